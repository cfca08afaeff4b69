"""How much learning rate a lag bears, against weights that are moved step by step."""

from __future__ import annotations

import pytest

from stagewright.plan.stability import Motion, stability_remark, stable_limit


def settles(motion: Motion, product: float) -> bool:
    """Whether a weight on a parabola comes to rest, by torch's own rule for SGD, its gradients late."""
    weights, velocities = [1.0] * (motion.lag + 1), [0.0] * (motion.lag + 1)
    mu = motion.momentum
    for _ in range(40_000):
        seen = weights[-1 - motion.lag]
        if motion.is_predicted:
            for ahead in range(1, motion.lag + 1):
                seen -= mu**ahead * velocities[-1 - motion.lag]
        gradient = product * seen
        velocities.append(mu * velocities[-1] + gradient)
        weights.append(weights[-1] - (gradient + mu * velocities[-1] if motion.is_nesterov else velocities[-1]))
        if abs(weights[-1]) > 1e3:
            return False
    return abs(weights[-1]) < 1e-3


@pytest.mark.parametrize(
    "motion",
    [
        *(Motion(0.9, lag) for lag in (0, 1, 3)),
        *(Motion(0.9, lag, is_predicted=True) for lag in (1, 3)),
        Motion(0.5, 2),
        Motion(0.0, 2, is_predicted=True),
        Motion(0.8, 1, is_nesterov=True),
    ],
    ids=str,
)
def test_just_below_the_limit_a_weight_settles_and_just_above_it_does_not(motion: Motion) -> None:
    limit = stable_limit(motion)
    assert settles(motion, 0.97 * limit)
    assert not settles(motion, 1.03 * limit)


def test_the_limits_at_the_usual_momentum() -> None:
    assert [round(stable_limit(Motion(0.9, lag)), 3) for lag in (0, 1, 3, 7)] == [3.8, 0.1, 0.035, 0.016]


def test_a_remark_has_the_limit_and_the_remedies() -> None:
    remark = stability_remark(Motion(0.9, 3), 0.4)
    assert remark is not None
    for part in (
        "stable up to 0.035 (without lag 3.8)",
        "--lr 0.4",
        "0.087",
        "--predict (up to 0.069)",
        "--staleness 1",
    ):
        assert part in remark
    assert "--predict" not in (stability_remark(Motion(0.9, 3, is_predicted=True), 0.4) or "--predict")
    assert "--momentum" not in (stability_remark(Motion(1.0, 1), 0.1) or "--momentum")  # settles at no rate
    assert stability_remark(Motion(0.9, 1), 0.09) is None
    assert stability_remark(Motion(0.9, 0), 3.0) is None
