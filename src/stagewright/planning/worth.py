"""What clusters are worth: price and power of whole machines, and when the dearer of two has paid for itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from stagewright.cluster.catalog import price_source
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster
from stagewright.errors import UserError
from stagewright.metrics import GIB
from stagewright.plan.estimate import Setting
from stagewright.planning.compare import interval, setting_evidence
from stagewright.planning.planner import Choice
from stagewright.planning.predict import IMAGENET

_HOURS = 24 * 365
_REST_WATTS = 150.0  # of a machine beside its cards, where nobody says
_LARGE = 2  # cards: a box with more needs a larger board, processor and case


def cluster_worth(
    choice: Choice, setting: Setting, catalog: Catalog, prices: Mapping[str, float], kwh: float
) -> dict[str, Any]:
    """The best plan on a cluster, its speed for the price and the power, and what these are based on."""
    best = choice.best
    rate, own = best.prediction.images_per_second, interval(best.prediction, setting, catalog, measured=False)
    kinds = [setting.cluster.kind_of(device) for device in setting.cluster.devices]
    rest = list(_rest(setting.cluster, prices))
    usd = _total((prices.get(kind, setting.devices(kind).usd) for kind in kinds), sum(price for price, _ in rest))
    own_watts = sum(machine.watts or _REST_WATTS for machine in setting.cluster.machines)
    watts = _total((setting.devices(kind).watts for kind in kinds), own_watts)
    memory = sum(setting.devices(kind).memory for kind in kinds) / GIB
    epoch = None if watts is None else IMAGENET / 3.6e6 * watts * kwh
    return {
        "cluster": setting.cluster.name,
        "plan": f"{best.plan.mode} {best.plan.shape}",
        "lag": best.plan.lag,
        "images_per_second": rate,
        "low": own.low,
        "high": own.high,
        "evidence": str(setting_evidence(setting, measured=False)),
        "usd": usd,
        "watts": watts,
        "per_dollar": rate / usd if usd else None,
        "per_watt": rate / watts if watts else None,
        "epoch_usd": None if epoch is None else epoch / rate,
        "epoch_usd_interval": None if epoch is None else [epoch / own.high, epoch / own.low],
        "year_usd": None if watts is None else watts / 1000 * _HOURS * kwh,
        "memory_gib": memory,
        "gib_per_thousand_dollars": memory / usd * 1000 if usd else None,
        "prices": [*_price_notes(setting, prices, kinds), *(note for _, note in rest[:1])],
    }


def _total(of_devices: Iterator[float | None], beside: float) -> float | None:
    """Of whole machines; None where it is not known of a device."""
    known = list(of_devices)
    return sum(value or 0.0 for value in known) + beside if all(known) else None


def _price_notes(setting: Setting, prices: Mapping[str, float], kinds: Collection[str]) -> Iterator[str]:
    """Where the price of each kind of device is from."""
    for kind in sorted(set(kinds)):
        price = prices.get(kind, setting.devices(kind).usd)
        if price is None:
            yield f"{kind}: no price; give --price {kind}=USD"
        else:
            yield f"{kind}: USD {price:,.0f}, {'your price' if kind in prices else price_source(kind)}"


def _rest(cluster: Cluster, prices: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Dollars of what is beside each machine's cards, by the cluster file or as usual for a home-built box."""
    for machine in cluster.machines:
        parts = dict(machine.parts) or _usual_parts(machine.devices or 1)
        parts |= {name: usd for name, usd in prices.items() if name in parts}
        source = "of the cluster file" if machine.parts else "usual in 2023"
        listed = ", ".join(f"{name} {usd:,.0f}" for name, usd in parts.items())
        total = sum(parts.values())
        yield total, f"{cluster.name}, a machine beside its cards: USD {total:,.0f}, {source}: {listed}"


def _usual_parts(devices: int) -> dict[str, float]:
    """What builders list beside the cards, for a box of so many of them."""
    is_large = devices > _LARGE
    return {
        "board": 600.0 if is_large else 200.0,
        "processor": 800.0 if is_large else 300.0,
        "memory": 100.0 * max(2, devices),
        "power supply": 200.0 * (1 + devices // 3),
        "case": 150.0 if is_large else 100.0,
        "drives": 150.0,
    }


def require_priced(prices: Collection[str], settings: Collection[Setting]) -> None:
    """Raise for the price of a device that no cluster has: it would change nothing."""
    kinds = {setting.cluster.kind_of(device) for setting in settings for device in setting.cluster.devices}
    for name in prices:
        if name not in kinds:
            raise UserError(
                f"--price names '{name}' but the clusters have {', '.join(sorted(kinds))}; name one of these"
            )


def break_even(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """After how many ImageNet epochs the cluster that is cheaper to run has paid for its price, with the interval."""
    if None in (one["usd"], other["usd"], one["epoch_usd"], other["epoch_usd"]):
        return None
    cheap, dear = sorted((one, other), key=lambda row: row["usd"])
    price = dear["usd"] - cheap["usd"]
    (cheap_low, cheap_high), (dear_low, dear_high) = cheap["epoch_usd_interval"], dear["epoch_usd_interval"]
    saved = (cheap["epoch_usd"] - dear["epoch_usd"], cheap_high - dear_low, cheap_low - dear_high)
    epochs, low, high = (price / value if value > 0 else None for value in saved)
    if epochs is None:
        perhaps = "" if low is None else f", unless errors favour it: then after {low:,.0f} epochs"
        cheaper = f"{cheap['cluster']} costs USD {price:,.0f} less, and less to run"
        sentence = f"{cheaper}; {dear['cluster']} never breaks even{perhaps}"
    else:
        last = "never" if high is None else f"{high:,.0f}"
        sentence = (
            f"{dear['cluster']} costs USD {price:,.0f} more and pays that back in electricity after {epochs:,.0f} "
            f"epochs of ImageNet ({low:,.0f} to {last})"
        )
    return {"epochs": epochs, "low": low, "high": high, "sentence": sentence}
