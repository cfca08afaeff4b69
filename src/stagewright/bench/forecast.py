"""What a configuration would do on a cluster of the catalogue, by Stagewright's own efficiency."""

from __future__ import annotations

from stagewright.bench.layout import layout
from stagewright.catalog.values import Catalogue
from stagewright.cluster import Cluster, parse_placement
from stagewright.config.sections import Config
from stagewright.plan.make import default_microbatches
from stagewright.plan.partition import best_cuts
from stagewright.plan.plan import Mode
from stagewright.planner import settle_lag
from stagewright.predict import Prediction, analytic_setting, predict, study


def forecast(config: Config, catalogue: Catalogue, cluster: Cluster, *, loads: bool) -> Prediction:
    """Simulate the plan that a configuration describes."""
    studied = study(config.model.name, config.model.classes, config.data.image)
    setting = analytic_setting(
        catalogue,
        cluster,
        studied.shapes,
        catalogue.system("stagewright"),
        config.run.precision,
        optimizer=config.optimizer.name,
        loads=loads,
    )
    options = config.plan
    placement = parse_placement(options.placement, cluster)

    def fastest() -> tuple[str, ...]:
        count = options.microbatches or default_microbatches(options.batch, [len(devices) for devices in placement])
        return best_cuts(setting, placement, Mode(options.mode), options.batch, count)

    plan = layout(config, studied.chain, placement, fastest)
    if options.versions is None:
        plan = settle_lag(plan, setting, options.staleness)
    return predict(plan, setting)
