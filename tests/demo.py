"""A demo with given figures, for tests of what is said about them."""

from __future__ import annotations

from stagewright.bench.demo.machines import Machines
from stagewright.bench.demo.ranks import HERE
from stagewright.bench.demo.run import Demo, Length, Measured, setting_on
from stagewright.cluster.catalog import shipped
from stagewright.metrics import Span, Timeline
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.planning.predict import predict
from stagewright.profile.profile import Ceilings, Profile, Table, Unit

_UNITS = tuple(Unit(name, "linear", 0.01, 0.02, 9, 9, 9, 9, 9) for name in ("features.0", "classifier.0"))
_CEILINGS = Ceilings({"fp32": 1e9}, 1e9, 5e8, 1e8, (), 0.25)
_TABLES = tuple(Table("fp32", samples, _UNITS) for samples in (8, 32))
PROFILE = Profile("vgg-small", "cpu", "stagewright", (3, 32, 32), 2, _CEILINGS, _TABLES)


def make_demo(ours: float = 480.0, theirs: float = 160.0, accuracy: float = 0.99) -> Demo:
    """A demo of three turns in which stages and DDP reached these speeds."""
    machines = Machines((HERE, HERE), shipped().links["net-1g"])
    setting = setting_on(PROFILE, machines.link)
    one, two = setting.cluster.devices
    whole = make_plan(((one, two),), batch=64, microbatches=2, mode=Mode.DP)
    cut = make_plan(((one,), (two,)), batch=64, microbatches=2, mode=Mode.SYNC, cuts=("classifier.0",))

    def side(name: str, rate: float, plan: object, link_bytes: float, reached: float, busy: float) -> Measured:
        rates = (rate, rate * 1.01, rate * 0.99)
        spans = tuple(Span(rank, "compute", "F", "0F1@0", 0.0, busy) for rank in range(2))
        ends = tuple(Span(rank, "wait", "R", "0R@0", busy, 1.0) for rank in range(2))
        prediction = predict(plan, setting)  # type: ignore[arg-type]
        accuracies = (0.5, 0.9, reached)
        return Measured(name, prediction, rates, (4, 8, 12), accuracies, link_bytes, Timeline(spans + ends), 0.0)

    return Demo(
        machines,
        "",
        Length(3, 20, 6),
        side("stages", ours, cut, 1.05e6, accuracy, 0.75),
        side("DDP", theirs, whole, 68.2e6, 0.987, 0.25),
        {("net-1g", 64): 2.9, ("net-10g", 64): 0.8},
    )
