"""`stagewright profile`: measure every unit of a model on this device."""

from __future__ import annotations

import argparse
import json

from stagewright.commands.options import Commands, add_json


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure every unit of a model on this device",
        usage="stagewright profile MODEL [-o FILE] [options]",
        description="Measure forward, backward and bytes of every unit, the device's ceilings and its links.",
    )
    add_json(parser)
    parser.add_argument("model", help="zoo name, or package.module:factory")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--samples", default="8,16", metavar="N,N", help="microbatch sizes (default: 8,16)")
    parser.add_argument(
        "--precision", default="fp32", help="fp64, fp32, ieee, tf32, bf16 or fp16, or several: fp32,bf16"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="kind of device (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a CPU rank (default: 1)")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="processes at once, as ranks would run")
    parser.add_argument("--image", type=int, metavar="N", help="side of the images (default: the model's own)")
    parser.add_argument("--classes", type=int, metavar="N", help="outputs of a zoo model (default: its own)")
    parser.add_argument("--pipedream", metavar="FILE", help="import PipeDream's graph.txt, taken at --samples")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    errors = Console(stderr=True)
    with errors.status("profiling") as status:
        from stagewright.profiling import profile_here, profile_imported

        tell = status.update if errors.is_terminal else lambda text: None
        profile = profile_imported(parsed) if parsed.pipedream else profile_here(parsed, tell)
    if parsed.output:
        profile.write(parsed.output)
    if parsed.json:
        from dataclasses import asdict

        print(json.dumps(asdict(profile)))
        return
    from stagewright.report.profile import show_profile

    show_profile(Console(), profile)
    if parsed.output:
        print(f"written to {parsed.output}")
