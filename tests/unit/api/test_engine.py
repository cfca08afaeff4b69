"""Engine in one process: what a script's loop trains, sees and may do, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import stagewright
from stagewright import Engine
from stagewright.data.order import Order, TrainingSampler, permutation
from stagewright.errors import UserError
from stagewright.runtime.script.feed import EpochSampler

BATCH, SAMPLES, EPOCHS = 8, 44, 2  # five batches an epoch, and four samples that are dropped
STAGES = {"placement": "0:0-1.0:2", "cut": "3", "mode": "stale", "staleness": 1, "emulate": True, "microbatches": 4}


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)]
    return nn.Sequential(*layers)


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


DATA = TensorDataset(*make_data())


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def make_engine(folder: Path, model: nn.Module | None = None, **options: Any) -> Engine:
    given = {"optimizer": make_optimizer, "loss": nn.CrossEntropyLoss(), "precision": "fp64", "runs": folder}
    return Engine(model or make_model(), **given | options)


def batches_of(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    inputs, target = make_data()
    order = torch.from_numpy(permutation(0, epoch, SAMPLES).copy())
    for first in range(0, SAMPLES - BATCH + 1, BATCH):
        chosen = order[first : first + BATCH]
        yield inputs[chosen].double(), target[chosen]


def train_plainly(model: nn.Module, epochs: int = EPOCHS, scheduler: Any = None) -> list[float]:
    """A plain loop of PyTorch over the same batches."""
    model.double()
    optimizer, losses = make_optimizer(model.parameters()), []
    schedule = scheduler(optimizer) if scheduler else None
    for epoch in range(epochs):
        for inputs, target in batches_of(epoch):
            loss = nn.functional.cross_entropy(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if schedule:
                schedule.step()
    return losses


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, tensor in expected.items():
        assert torch.allclose(found[name].double(), tensor.double(), rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("plan", [{}, {"placement": "0:0.0:1", "mode": "sync", "cut": "3", "emulate": True}], ids=str)
def test_a_loop_trains_what_a_plain_one_does(plan: dict[str, Any], tmp_path: Path) -> None:
    plain = make_model()
    expected = train_plainly(plain)
    with make_engine(tmp_path, **plan) as engine:
        losses = [step.loss for _ in range(EPOCHS) for step in engine.epoch(DATA, batch=BATCH)]
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert_same(weights, plain.state_dict())


def test_an_uncut_model_is_itself_trained(tmp_path: Path) -> None:
    plain, model = make_model(), make_model()
    train_plainly(plain, 1)
    parameters = list(model.parameters())
    with make_engine(tmp_path, model) as engine:
        for _ in engine.epoch(DATA, batch=BATCH):
            pass
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert_same(model.state_dict(), plain.state_dict())


def test_stages_with_lag_train_as_the_command_does(tmp_path: Path) -> None:
    result = stagewright.train(
        make_model(), DATA, loss=nn.CrossEntropyLoss(), optimizer=make_optimizer, precision="fp64", batch=BATCH,
        epochs=EPOCHS, runs=tmp_path, **STAGES,
    )  # fmt: skip
    with make_engine(tmp_path, **STAGES) as engine:
        losses = [step.loss for _ in range(EPOCHS) for step in engine.epoch(DATA, batch=BATCH)]
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
    assert losses == [step.loss for step in result.steps]
    assert all(torch.equal(weights[name], tensor) for name, tensor in result.weights().items())


@pytest.mark.parametrize("plan", [{}, STAGES], ids=["alone", "stages"])
def test_batches_may_come_from_a_loader_or_one_by_one(plan: dict[str, Any], tmp_path: Path) -> None:
    with make_engine(tmp_path, **plan) as engine:
        expected = [step.loss for step in engine.epoch(DATA, batch=BATCH)]
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
    given = [(inputs, target) for inputs, target in batches_of(0)]
    with make_engine(tmp_path, **plan) as engine:
        assert [step.loss for step in engine.epoch(iter(given))] == expected
        assert_same(load_file(engine.save(tmp_path / "v.safetensors")), weights, 0)
    with make_engine(tmp_path, **plan) as engine:
        newest = [engine.step(batch) for batch in given]
        last = engine.wait()
        assert last is not None and last.loss == expected[-1] and engine.done == len(given)
        lag = max(stage.versions for stage in engine.plan.stages) - 1
        assert [None if step is None else step.batch for step in newest] == [None] * lag + list(range(len(given) - lag))
        assert_same(load_file(engine.save(tmp_path / "u.safetensors")), weights, 0)


def test_a_loader_leaves_out_a_last_batch_that_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_engine(tmp_path) as engine:
        steps = list(engine.epoch(DataLoader(DATA, batch_size=BATCH)))
    said = capsys.readouterr().err
    assert len(steps) == SAMPLES // BATCH and f"the last {SAMPLES % BATCH} samples" in said
    assert said.count("in its own order") == 1


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=20)


def test_schedulers_act_from_the_next_batch_on(tmp_path: Path) -> None:
    """Its own, whose rate and momentum a script steps, or one that the engine steps: both as in a plain loop."""
    plain = make_model()
    expected = train_plainly(plain, scheduler=one_cycle)
    with make_engine(tmp_path) as engine:
        scheduler, losses = one_cycle(engine.optimizer), []
        for _ in range(EPOCHS):
            for step in engine.epoch(DATA, batch=BATCH):
                losses.append(step.loss)
                scheduler.step()
    assert losses == pytest.approx(expected, rel=1e-12)
    with make_engine(tmp_path, scheduler=one_cycle) as engine:
        steps = [step for _ in range(EPOCHS) for step in engine.epoch(DATA, batch=BATCH)]
        assert [step.loss for step in steps] == pytest.approx(expected, rel=1e-12)
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
    assert_same(weights, plain.state_dict())
    optimizer = make_optimizer(make_model().parameters())
    schedule, rates = one_cycle(optimizer), []
    for _ in steps:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [step.lr for step in steps] == pytest.approx(rates)


def test_with_lag_a_rate_acts_on_the_same_update_of_every_stage(tmp_path: Path) -> None:
    """The rate falls behind batch 2: as in a run whose schedule says so."""
    result = stagewright.train(
        make_model(), DATA, loss=nn.CrossEntropyLoss(), optimizer="sgd", lr=0.1, precision="fp64", batch=BATCH,
        epochs=EPOCHS, runs=tmp_path, lr_schedule="step", lr_steps="3", lr_gamma=0.5, **STAGES,
    )  # fmt: skip
    with make_engine(tmp_path, **STAGES) as engine:
        for _ in range(EPOCHS):
            for step in engine.epoch(DATA, batch=BATCH):
                if step.batch == 2:
                    engine.optimizer.param_groups[0]["lr"] = 0.05
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
    assert_same(weights, result.weights())


def test_leaving_a_loop_trains_what_was_begun(tmp_path: Path) -> None:
    with make_engine(tmp_path, **STAGES) as engine:
        for step in engine.epoch(DATA, batch=BATCH):
            if step.batch == 1:
                break
        assert engine.done == 3  # batch 2 had begun
        rest = [step.batch for step in engine.epoch(DATA, batch=BATCH)]
        assert rest == [3, 4, 5, 6, 7] and engine.done == 8


def top1(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(1) == target).double().mean()


def test_evaluations_in_and_after_a_loop_change_no_bit(tmp_path: Path) -> None:
    with make_engine(tmp_path, **STAGES) as engine:
        for _ in engine.epoch(DATA, batch=BATCH):
            pass
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
        found = engine.evaluate(DATA, metrics={"right": top1})
    with make_engine(tmp_path, **STAGES) as engine:
        seen = []
        for step in engine.epoch(DATA, batch=BATCH):
            seen.append(step.batch)
            if step.batch == 1:
                engine.evaluate(DATA)
        assert seen == [0, 1, 2, 3, 4]
        assert_same(load_file(engine.save(tmp_path / "v.safetensors")), weights, 0)
    model = make_model().double()
    model.load_state_dict(weights)
    inputs, target = make_data()
    outputs = model(inputs.double())
    assert found.samples == SAMPLES and found.metrics == {"right": pytest.approx(float(top1(outputs, target)))}
    assert found.loss == pytest.approx(nn.functional.cross_entropy(outputs, target).item())


@pytest.mark.parametrize("plan", [{}, STAGES], ids=["alone", "stages"])
def test_a_resumed_script_sees_its_steps_again_and_ends_with_the_same_bits(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    def script(engine: Engine, *, stops: bool) -> list[tuple[int, float, bool]]:
        seen, scheduler = [], one_cycle(engine.optimizer)
        for epoch in range(EPOCHS):
            for step in engine.epoch(DATA, batch=BATCH):
                seen.append((step.batch, step.loss, step.is_replayed))
                scheduler.step()
                if stops and step.batch == 6:
                    return seen
            seen.append((epoch, engine.evaluate(DATA).loss, False))
        return seen

    with make_engine(tmp_path, **plan) as engine:
        expected = script(engine, stops=False)
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
    with make_engine(tmp_path, checkpoint_every=6, **plan) as engine:  # behind the first evaluation
        script(engine, stops=True)
        run = engine.folder
    with make_engine(tmp_path, resume=run, **plan) as engine:
        seen = script(engine, stops=False)
        again = load_file(engine.save(tmp_path / "v.safetensors"))
    assert [one[:2] for one in seen] == [one[:2] for one in expected]
    assert [batch for batch, _, is_replayed in seen if is_replayed] == [0, 1, 2, 3, 4, 5]
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_a_checkpoint_and_a_save_in_a_loop_are_of_whole_batches_and_replayed_ones_write_nothing(tmp_path: Path) -> None:
    """What is saved at step 1 has the batches that were begun; a resumed script does not write it anew."""
    file = tmp_path / "best.safetensors"

    def script(engine: Engine) -> dict[str, Tensor]:
        for step in engine.epoch(DATA, batch=BATCH):
            if step.batch == 1:
                engine.checkpoint()
                engine.save(file)
        return load_file(engine.save(tmp_path / "last.safetensors"))

    with make_engine(tmp_path, **STAGES) as engine:
        last, run = script(engine), engine.folder
        weights, when = load_file(file), file.stat().st_mtime_ns
    with make_engine(tmp_path, **STAGES) as engine:
        for step in engine.epoch(DATA, batch=BATCH):
            if step.batch == 1:
                break
        assert_same(weights, load_file(engine.save(tmp_path / "three.safetensors")), 0)
    with make_engine(tmp_path, resume=run, **STAGES) as engine:
        again = script(engine)
    assert file.stat().st_mtime_ns == when
    assert_same(again, last, 0)


def test_leaving_a_replayed_loop_leaves_it_at_the_same_batch(tmp_path: Path) -> None:
    def script(engine: Engine) -> list[int]:
        seen = []
        for stop in (1, 8):
            for step in engine.epoch(DATA, batch=BATCH):
                seen.append(step.batch)
                if step.batch == stop:
                    break
        return seen

    with make_engine(tmp_path, checkpoint_every=5, **STAGES) as engine:
        first, run = script(engine), engine.folder
    with make_engine(tmp_path, resume=run, **STAGES) as engine:
        assert script(engine) == first == [0, 1, 3, 4, 5, 6, 7]


def test_checkpoints_come_by_the_minute_in_one_process_too_and_change_no_bit(tmp_path: Path) -> None:
    found = []
    for minutes in (0.0, 1e-6):
        with make_engine(tmp_path, checkpoint_minutes=minutes, **STAGES) as engine:
            found.append([step.loss for step in engine.epoch(DATA, batch=BATCH)])
        assert bool(minutes) == any((engine.folder / "checkpoints").glob("[0-9]"))
    assert found[0] == found[1]


PIPEDREAM = {"placement": "0:0-2.0:3", "cut": "3", "mode": "pipedream", "emulate": True, "microbatches": 2}


def test_pipedream_ends_epochs_with_its_rounds_and_takes_the_rate_of_their_first_batch(tmp_path: Path) -> None:
    """A round of the first stage is three microbatches, a batch two: they end together every third batch."""
    with make_engine(tmp_path, scheduler=lambda optimizer: StepLR(optimizer, 1), **PIPEDREAM) as engine:
        batches = [step.batch for step in engine.epoch(DATA, batch=BATCH)]
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
    assert batches == [0, 1, 2]  # of five, the most that is a multiple of three
    expected = stagewright.train(
        make_model(), DATA, loss=nn.CrossEntropyLoss(), optimizer="sgd", lr=0.1, precision="fp64", batch=BATCH,
        steps=3, runs=tmp_path, lr_schedule="step", lr_steps="1,2", lr_gamma=0.1, **PIPEDREAM,
    )  # fmt: skip
    assert_same(weights, expected.weights())


def test_a_rate_set_between_epochs_is_the_replayed_steps_rate_too(tmp_path: Path) -> None:
    def rates(engine: Engine) -> list[float]:
        seen = []
        for _ in range(EPOCHS):
            seen += [step.lr for step in engine.epoch(DATA, batch=BATCH)]
            engine.optimizer.param_groups[0]["lr"] *= 0.5
        return seen

    with make_engine(tmp_path, checkpoint_every=4) as engine:
        first, run = rates(engine), engine.folder
    with make_engine(tmp_path, resume=run) as engine:
        assert rates(engine) == first == [0.1] * 5 + [0.05] * 5
        assert engine.done == 10


def test_epochs_have_the_order_and_the_augmentation_of_a_run_of_the_command() -> None:
    order = Order(SAMPLES, BATCH, seed=3, shuffle=True)
    run = TrainingSampler(order, 2)
    for epoch in range(3):
        sampler = EpochSampler(order, epoch, first=order.batches * epoch, microbatches=2)
        for number in range(2 * order.batches * epoch, 2 * order.batches * (epoch + 1)):
            assert sampler.indices(number).tolist() == run.indices(number).tolist()
            assert sampler.augment_seed(number) == run.augment_seed(number)


def test_what_a_script_draws_does_not_depend_on_training(tmp_path: Path) -> None:
    with make_engine(tmp_path, **STAGES) as engine:
        torch.manual_seed(3)
        drawn = [float(torch.rand(())) for _ in engine.epoch(DATA, batch=BATCH)]
    torch.manual_seed(3)
    assert drawn == [float(torch.rand(())) for _ in drawn]


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(UserError, match="did you mean 'placement'"):
        make_engine(tmp_path, placment="0:0")
    with pytest.raises(UserError, match="leave the loop"):
        make_engine(tmp_path, steps=3)
    with pytest.raises(UserError, match=r"SGD of parameters.*lambda parameters"):
        make_engine(tmp_path, model, optimizer=make_optimizer(model.parameters()))
    with pytest.raises(UserError, match="holds 8 other tensors"):
        make_engine(tmp_path, optimizer=lambda params: make_optimizer(model.parameters()))
    with pytest.raises(UserError, match=r"nn\.Module, not a function"):
        Engine(make_model)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a function of parameters"):
        make_engine(tmp_path, optimizer="sgd", scheduler=one_cycle)
    with pytest.raises(UserError, match=r"torch\.optim\.SGD"):
        _ = make_engine(tmp_path, optimizer="sgd").optimizer


def test_the_model_gets_the_newest_weights_on_request(tmp_path: Path) -> None:
    model = make_model()
    with make_engine(tmp_path, model, **STAGES) as engine:
        for _ in engine.epoch(DATA, batch=BATCH):
            pass
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        weights = load_file(engine.save(tmp_path / "w.safetensors"))
        assert_same(before, make_model().state_dict())  # a copy was trained
        assert engine.update_model() is model
        assert_same(dict(model.state_dict()), weights, 1e-6)
        assert engine.evaluate(DATA).samples == SAMPLES  # the engine goes on with it


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 3), ({"threads": 2}, 2), (STAGES, 1), (STAGES | {"threads": 2}, 2)],
    ids=["alone", "alone as asked", "emulated as ranks", "emulated as asked"],
)
def test_computes_with_as_many_threads_as_its_job_says(options: dict[str, Any], expected: int, tmp_path: Path) -> None:
    """Other numbers of threads may add in another order, and so train other bits than real ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with make_engine(tmp_path, **options) as engine:
            next(iter(engine.epoch(DATA, batch=BATCH)))
            assert torch.get_num_threads() == expected
        (job,) = tmp_path.glob("*/job.json")
        assert json.loads(job.read_text())["config"]["run"]["threads"] == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_plan_brings_its_own_batch(tmp_path: Path) -> None:
    with make_engine(tmp_path, **STAGES | {"placement": "0:0-1.1:0"}) as engine:  # over two machines, emulated
        losses = [step.loss for step in engine.epoch(DATA, batch=BATCH)]
        plan = engine.plan
    with make_engine(tmp_path, plan=plan, emulate=True) as engine:
        assert [step.loss for step in engine.epoch(DATA, batch=BATCH)] == losses
        with pytest.raises(UserError, match=f"batch=4 but the run trains batches of {BATCH}"):
            next(iter(engine.epoch(DATA, batch=4)))


def test_trains_on_a_gpu_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.hardware.devices.default_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="cuda"):
        next(iter(make_engine(tmp_path).epoch(DATA, batch=BATCH)))
    with make_engine(tmp_path, device="cpu") as engine:
        next(iter(engine.epoch(DATA, batch=BATCH)))


def test_data_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        with pytest.raises(UserError, match="batch is not known"):
            engine.evaluate(DATA)
        for _ in engine.epoch(DATA, batch=BATCH):
            break
        with pytest.raises(UserError, match="batch=16 but the run trains batches of 8"):
            list(engine.epoch(DATA, batch=16))
        with pytest.raises(UserError, match="the iterable is empty"):
            list(engine.epoch(iter([])))
        inputs, target = make_data()
        engine.step((inputs[:BATCH], target[:BATCH]))
        with pytest.raises(UserError, match=r"batch \d has 6 samples"):
            engine.step((inputs[:6], target[:6]))


def test_a_dataset_that_changes_its_length_is_refused(tmp_path: Path) -> None:
    rows = [(inputs, target) for inputs, target in DATA]
    with make_engine(tmp_path) as engine, pytest.raises(UserError, match="had 44 samples and has 43 now"):
        for _ in engine.epoch(rows_of := Rows(rows), batch=BATCH):
            rows_of.rows = rows[:-1]


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_a_model_that_changes_after_the_engine_took_it_is_refused(tmp_path: Path) -> None:
    model = make_model()
    with make_engine(tmp_path, model, **STAGES) as engine:
        for _ in engine.epoch(DATA, batch=BATCH):
            break
        with torch.no_grad():
            model[0].weight.zero_()
        with pytest.raises(UserError, match=r"'0.weight' of the model was changed"):
            list(engine.epoch(DATA, batch=BATCH))


def test_an_optimizer_that_looks_across_parameters_is_refused_beyond_one_stage(tmp_path: Path) -> None:
    class Coupled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(norm)
            return super().step(closure)

    def coupled(params: Any) -> torch.optim.Optimizer:
        return Coupled(params, lr=0.1)

    with make_engine(tmp_path, optimizer=coupled) as engine:
        assert len(list(engine.epoch(DATA, batch=BATCH))) == 5
    with (
        make_engine(tmp_path, optimizer=coupled, **STAGES) as engine,
        pytest.raises(UserError, match="looks across parameters"),
    ):
        list(engine.epoch(DATA, batch=BATCH))


@pytest.mark.parametrize("plan", [{}, {"placement": "0:0.0:1", "cut": "5", "mode": "sync", "emulate": True}])
def test_an_engine_starts_from_weights_and_freezes_a_trunk(plan: dict[str, Any], tmp_path: Path) -> None:
    given = {name: tensor + 0.1 for name, tensor in make_model().state_dict().items()}
    save_file(given, tmp_path / "init.safetensors")
    plain = make_model()
    plain.load_state_dict(given)
    plain[:6].requires_grad_(False)
    with make_engine(tmp_path, init=tmp_path / "init.safetensors", freeze="!6", **plan) as engine:
        losses = [step.loss for step in engine.epoch(DATA, batch=BATCH)]
        engine.save(tmp_path / "trained.safetensors")
    assert losses == pytest.approx(train_plainly(plain, 1), rel=1e-12)
    found = load_file(tmp_path / "trained.safetensors")
    assert_same(found, plain.state_dict())
    assert {name for name in found if not torch.equal(found[name], given[name].double())} == {"6.weight", "6.bias"}
