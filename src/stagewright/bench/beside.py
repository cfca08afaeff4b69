"""The published runs of the models and clusters that a bench predicts, beside what the simulator says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stagewright.bench.outcome import PublishedRow, Row


def published_rows(rows: Iterable[Row], tell: Callable[[str], None]) -> tuple[PublishedRow, ...]:
    """One row a published run; the calibration is fitted anew, so that each run can be told by the others."""
    from stagewright.bench.published import measure
    from stagewright.published import published_runs

    wanted = [(row.model, row.cluster, row.precision) for row in rows if row.kind == "predicted"]
    if not any((run.model, run.cluster, run.precision) in wanted for run in published_runs()):
        return ()
    found = []
    for row in measure(tell).rows:
        run = row.run
        if (run.model, run.cluster, run.precision) not in wanted:
            continue
        found.append(
            PublishedRow(
                system=run.system,
                model=run.model,
                cluster=f"{run.cluster} x{run.devices}" if run.devices else run.cluster,
                mode=f"{run.mode}, {run.scheduling}" if run.scheduling else run.mode,
                data="real" if run.data == "imagenet" else run.data,
                precision=run.precision,
                batch=f"{run.global_batch}" if run.global_batch else f"{run.microbatch} each",
                predicted=row.predicted,
                published=run.rate,
                told=row.error,
                is_alone=row.is_alone,
                memory=tuple(row.memory),
                published_memory=tuple(run.memory_mib),
                epochs=tuple(run.epoch_seconds),
            )
        )
    order = list(dict.fromkeys(model for model, _, _ in wanted))
    return tuple(sorted(found, key=lambda row: order.index(row.model)))
