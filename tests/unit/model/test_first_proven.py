"""Ways of cutting are tried in their order, until the pieces of one are proven."""

from types import SimpleNamespace

import pytest

from stagewright.errors import UserError
from stagewright.model.chain import Way
from stagewright.model.prove import Differs, first_proven


class Ways:
    """Chains of all ways, of which a model may lack some; notes which are tried."""

    def __init__(self, default: Way, *missing: Way) -> None:
        self.default = default
        self.missing = missing
        self.tried: list[Way] = []

    def by(self, way: Way) -> SimpleNamespace:
        return SimpleNamespace(way=Way.WHOLE if way in self.missing else way, by=self.by)

    def run(self, **errors: UserError) -> Way:
        def attempt(chain: SimpleNamespace) -> Way:
            self.tried.append(chain.way)
            if error := errors.get(chain.way):
                raise error
            return Way(chain.way)

        return first_proven(self.by(self.default), attempt)  # type: ignore[arg-type]


def test_takes_the_default_way_where_it_is_proven() -> None:
    ways = Ways(Way.GRAPH)
    assert ways.run() is Way.GRAPH and ways.tried == [Way.GRAPH]


def test_tries_the_next_way_where_one_differs_and_leaves_out_what_a_model_lacks() -> None:
    ways = Ways(Way.GRAPH, Way.VALUES)
    assert ways.run(graph=Differs("output")) is Way.BLOCKS and ways.tried == [Way.GRAPH, Way.BLOCKS]


def test_the_first_difference_is_the_error_whatever_later_ways_say() -> None:
    for last in (Differs("later"), UserError("no such unit")):
        ways = Ways(Way.GRAPH, Way.VALUES)
        with pytest.raises(Differs, match="the output"):
            ways.run(graph=Differs("the output"), blocks=last)


def test_an_error_that_is_no_difference_is_raised_at_once() -> None:
    ways = Ways(Way.BLOCKS)
    with pytest.raises(UserError, match="tied"):
        ways.run(blocks=UserError("tied"))
    assert ways.tried == [Way.BLOCKS]


def test_a_model_that_is_not_cut_is_attempted_whole() -> None:
    assert Ways(Way.WHOLE).run() is Way.WHOLE
