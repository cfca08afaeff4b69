"""What the demo says about figures that it measured, and the two machines it measures them on."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.bench.demo.digits import CLASSES, draw_digits, uncertainty
from stagewright.bench.demo.machines import bytes_passed, two_machines
from stagewright.bench.demo.page import demo_page, sentences, warnings
from stagewright.bench.demo.run import BATCHES, LINKS, best_stages, predicted_ratios, scratch_folder, setting_on
from stagewright.cluster.catalog import shipped
from stagewright.metrics import Span, Timeline
from stagewright.plan.plan import Mode
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Pipeline
from stagewright.report.timeline import first_view
from tests.demo import PROFILE, make_demo


def test_three_sentences_say_what_was_measured_in_this_run() -> None:
    demo = make_demo()
    speed, reason, learnt = sentences(demo)
    assert "3.00 times as fast" in speed and "480 against 160" in speed and f"{demo.ratio.low:.2f}" in speed
    assert "68.2 MB" in reason and "1.1 MB" in reason and "25%" in reason and "75%" in reason
    assert "4,224 images" in learnt and "99.0%" in learnt and "98.7%" in learnt and "within chance" in learnt
    assert not list(warnings(demo))


def test_a_demo_that_does_not_win_says_so() -> None:
    assert sentences(make_demo(160.0, 160.0))[0].startswith("No speedup here: two stages have 1.00 times")
    unsure = make_demo()
    unsure = replace(unsure, ours=replace(unsure.ours, rates=(100.0, 300.0, 400.0)))
    assert not unsure.wins and sentences(unsure)[0].startswith("No significant speedup here")
    assert "more than chance" in sentences(make_demo(accuracy=0.9))[2]
    demo = make_demo()
    alone = replace(demo, why_local="ip is not installed", ours=replace(demo.ours, others=1.5))
    assert ["ip is not installed" in line or "1.5 cores" in line for line in warnings(alone)] == [True, True]


def test_the_page_has_both_timelines_of_one_length_and_where_stages_stop_winning() -> None:
    page = demo_page(make_demo())
    text = as_markdown(page)
    assert text.count("## Timeline: ") == text.count("Measured over 1 s;") == 2
    timelines = [block for block in page.blocks if isinstance(block, Pipeline)]
    assert [(block.title, block.colour) for block in timelines] == [
        ("Timeline: 1+1 stages, sync", 0),
        ("Timeline: stock DDP", 1),
    ]
    long = Timeline(tuple(Span(0, "compute", "F", f"0F{at}@0", at / 50, (at + 1) / 50) for at in range(200)))
    assert first_view(replace(timelines[0], timeline=long)) == (0.0, 4.0), "whole, so that both have one scale"
    assert "| Waiting | 25% | of the ranks' time; DDP 75% |" in text and "| 480 images/s |" in text
    assert "| net-10g | 64 | 0.80 | data parallel |" in text
    assert "--cut classifier.0 --batch 64 --microbatches 2 --nodes" in text


def test_stages_are_planned_also_where_data_parallel_is_faster() -> None:
    ratios = predicted_ratios(PROFILE, Mode.SYNC)
    assert ratios.keys() == {(link, batch) for link in LINKS for batch in BATCHES}
    found = best_stages(setting_on(PROFILE, shipped().links["net-25g"]), 256)
    stale = best_stages(setting_on(PROFILE, shipped().links["net-25g"]), 64, Mode.STALE).plan
    assert [stage.versions for stage in stale.stages] == [2, 1]
    assert found.plan.shape == "1-1" and found.plan.cuts == ("classifier.0",) and found.plan.mode is Mode.SYNC


def test_digits_are_the_same_for_a_seed_and_cover_all_classes() -> None:
    images, labels = draw_digits(200, seed=1)
    assert images.shape == (200, 3, 32, 32) and labels.unique().numel() == CLASSES
    assert (draw_digits(200, seed=1)[0] == images).all() and (draw_digits(200, seed=2)[0] != images).any()
    assert uncertainty(0.9, 1000) == pytest.approx(0.0186, abs=1e-4) and uncertainty(1.0, 1000) > 0


def test_two_machines_reach_each_other_and_are_gone_afterwards() -> None:
    with two_machines(loopback=False) as (machines, why):
        if machines.link is None:
            pytest.skip(f"no network namespaces here: {why}")
        first, second = (place.command for place in machines.places)
        target = int(first[first.index("--target") + 1])
        before = bytes_passed(machines, target)
        ping = "import socket; s = socket.create_server(('10.77.0.2', 7000)); print(flush=True); s.accept()[0].recv(9)"
        send = "import socket; socket.create_connection(('10.77.0.2', 7000)).sendall(b'something')"
        with subprocess.Popen([*second, "python3", "-c", ping], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None and server.stdout.readline()
            subprocess.run([*first, "python3", "-c", send], check=True)
        after = bytes_passed(machines, target)
        assert before is not None and after is not None and after - before > 100
        shape = subprocess.run(
            [*second, "tc", "qdisc", "show", "dev", "eth"], capture_output=True, text=True, check=True
        )
        assert "tbf" in shape.stdout and "1Gbit" in shape.stdout
    assert not Path(f"/proc/{target}").exists()


def test_what_a_killed_run_left_is_removed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, running, other = (tmp_path / f"stagewright-demo-{who}-x" for who in (ended.pid, os.getpid(), "me"))
    for folder in (left, running, other):
        folder.mkdir()
    with scratch_folder() as mine:
        assert not left.exists() and running.exists() and other.exists() and mine.parent == tmp_path
    assert not mine.exists()


def test_loopback_needs_no_namespaces() -> None:
    with two_machines(loopback=True) as (machines, why):
        assert why == "--loopback"
        assert bytes_passed(machines, 1) is None and machines.nodes is None
