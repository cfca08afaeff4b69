"""Output of nvidia-smi for machines with and without NVLink, from drivers old and new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEGEND = """
Legend:

  X    = Self
  SYS  = Between sockets
  NV#  = A bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def topo(cells: Sequence[str], *, nics: int = 0, affinity: str = "0-23,48-71", tabs: bool = True) -> str:
    """The matrix of rows such as `X NV4 SYS`, with network cards behind the GPUs and terminal codes in the header."""
    gap = "\t" if tabs else "    "
    names = [f"GPU{index}" for index in range(len(cells))] + [f"NIC{index}" for index in range(nics)]
    header = gap + gap.join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\x1b[4m{header}\x1b[0m" if tabs else header]
    for index, row in enumerate(cells):
        lines.append(gap.join([f"GPU{index}", *row.split(), *["NODE"] * nics, affinity, "0", "N/A"]))
    for index in range(nics):
        lines.append(gap.join([f"NIC{index}", *["NODE"] * len(cells), *["X"] * nics]))
    return "\n".join(lines) + "\n" + LEGEND


# Eight cards behind four switches on two sockets, as in the published servers.
TITAN_8 = topo(
    [
        "X PIX PHB PHB SYS SYS SYS SYS",
        "PIX X PHB PHB SYS SYS SYS SYS",
        "PHB PHB X PIX SYS SYS SYS SYS",
        "PHB PHB PIX X SYS SYS SYS SYS",
        "SYS SYS SYS SYS X PIX PHB PHB",
        "SYS SYS SYS SYS PIX X PHB PHB",
        "SYS SYS SYS SYS PHB PHB X PIX",
        "SYS SYS SYS SYS PHB PHB PIX X",
    ]
)
# A hybrid cube mesh: every card has six links, to four of the other seven.
MESH_8 = topo(
    [
        "X NV1 NV2 NV1 SYS SYS SYS NV2",
        "NV1 X NV1 NV2 SYS SYS NV2 SYS",
        "NV2 NV1 X NV2 SYS NV1 SYS SYS",
        "NV1 NV2 NV2 X NV1 SYS SYS SYS",
        "SYS SYS SYS NV1 X NV2 NV2 NV1",
        "SYS SYS NV1 SYS NV2 X NV1 NV2",
        "SYS NV2 SYS SYS NV2 NV1 X NV1",
        "NV2 SYS SYS SYS NV1 NV2 NV1 X",
    ],
    nics=2,
)
SWITCHED_4 = topo(["X NV12 NV12 NV12", "NV12 X NV12 NV12", "NV12 NV12 X NV12", "NV12 NV12 NV12 X"], nics=1)
BRIDGED_4 = topo(["X NV4 PHB PHB", "NV4 X PHB PHB", "PHB PHB X NV4", "PHB PHB NV4 X"], tabs=False)


def smi_xml(
    name: str,
    mib: int | str,
    count: int,
    *,
    link: tuple[int | str, str] = (4, "16x"),
    mig: str = "N/A",
    watts: tuple[int, int] = (350, 350),
    is_old: bool = False,
    names: Mapping[int, str] | None = None,
) -> str:
    """What `nvidia-smi -q -x` prints for equal cards (or others with `names`), less most of it.

    A link is a generation and a width.
    """
    power, limit = ("power_readings", "enforced") if is_old else ("gpu_power_readings", "current")
    lines = ['<?xml version="1.0" ?>', '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">', "<nvidia_smi_log>"]
    lines += ["\t<timestamp>Mon Nov 16 12:00:00 2026</timestamp>", "\t<driver_version>550.54.15</driver_version>"]
    lines += [] if is_old else ["\t<cuda_version>12.4</cuda_version>"]
    lines.append(f"\t<attached_gpus>{count}</attached_gpus>")
    for index in range(count):
        lines += [
            f'\t<gpu id="00000000:{index + 1:02X}:00.0">',
            f"\t\t<product_name>{(names or {}).get(index, name)}</product_name>",
            f"\t\t<mig_mode><current_mig>{mig}</current_mig><pending_mig>{mig}</pending_mig></mig_mode>",
            f"\t\t<uuid>GPU-0000000{index}</uuid>",
            "\t\t<pci><pci_gpu_link_info>",
            f"\t\t\t<pcie_gen><max_link_gen>{link[0]}</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>",
            "\t\t\t<link_widths><max_link_width>16x</max_link_width>"
            f"<current_link_width>{link[1]}</current_link_width></link_widths>",
            "\t\t</pci_gpu_link_info></pci>",
            f"\t\t<fb_memory_usage><total>{mib} MiB</total><used>10 MiB</used></fb_memory_usage>",
            f"\t\t<{power}><power_draw>25.00 W</power_draw><{limit}_power_limit>{watts[0]}.00 W</{limit}_power_limit>",
            f"\t\t\t<default_power_limit>{watts[1]}.00 W</default_power_limit></{power}>",
            "\t\t<processes>\n\t\t</processes>",
            "\t</gpu>",
        ]
    return "\n".join([*lines, "</nvidia_smi_log>", ""])
