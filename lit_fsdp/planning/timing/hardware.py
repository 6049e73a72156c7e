"""What GPUs can do at most: peak FLOP/s by dtype, memory and its bandwidth, from their makers' data sheets.

Where the figures are published, all by NVIDIA:
the architecture white papers of Turing (TU102), Ampere (GA100, GA102), Ada (AD102), Hopper
(GH100) and RTX Blackwell (GB202), whose tables give tensor throughput by the dtype of the accumulator; for data
center and workstation cards the product data sheets. They are at the reference boost clock, dense: where a sheet says
"with sparsity", half of it. Left out are GPUs whose figures differ between sources (B200) or were not found (A10G).

Compared with copies of data sheets and with public databases (waredb, hmc-tech, sysrqmts), to a percent. All numbers:
RTX 4090, A40, T4, all A100, H100 SXM, H200 SXM, L40, L40S. Peaks only: RTX 3090 Ti, H100 PCIe. Float32 and bandwidth:
RTX 3060, 3090, 4060, 4060 Ti, 5090, A10, Quadro RTX 6000. Bandwidth only: RTX 5070 Ti, 5080. Of the RTX A6000 one
source agrees and one has 40.0 in float32. The others were not compared.

Half precision is that with float32 accumulation, which is what torch multiplies with. GeForce cards since Turing do
it at half the rate of float16 accumulation, so the larger number on their boxes is not the one that training can
reach. In each generation the ratios to float32 are the same for all cards of a kind, so the tables below give float32
only where that holds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    Args:
        name: As ``find_gpu`` shows it.
        memory_gib: As sold: "24 GB" of a GPU are GiB, of which the driver keeps some.
        bandwidth_gb_s: Of its memory, in 10^9 bytes per second.
        fp32_tflops: Without TF32.
        tf32_tflops: ``None`` where the tensor cores have no TF32.
        bf16_tflops: ``None`` where the tensor cores have no bfloat16.
        fp16_tflops: With float32 accumulation.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    fp32_tflops: float
    tf32_tflops: float | None
    bf16_tflops: float | None
    fp16_tflops: float

    @property
    def usable_gib(self) -> float:
        """What its driver has of ``memory_gib``: less a sixteenth where error correction, which is on, takes that."""
        return self.memory_gib * (15 / 16 if re.fullmatch("T4|A10|A40|L4|L40S?", self.name) else 1)

    @property
    def has_float8(self) -> bool:
        """Whether it multiplies in float8: compute capability 8.9 or more, Ada and what came after it."""
        return re.search(r"RTX [45]0\d\d|Ada|L4|H\d00", self.name) is not None

    @property
    def host_link_gb_s(self) -> float:
        """What copies between pinned memory and it reach, by its PCI Express."""
        return next((gb_s for name, gb_s in _HOST_LINKS if re.search(name, self.name)), 20.0)  # version 4, 16 lanes

    def get_peak_tflops(self, dtype: str) -> float | None:
        """Return the peak of matrix products.

        Of ``float32``, ``tf32``, ``bfloat16`` or ``float16``; ``None`` of others, and without tensor cores for it.
        """
        peaks = {
            "float32": self.fp32_tflops,
            "tf32": self.tf32_tflops,
            "bfloat16": self.bf16_tflops,
            "float16": self.fp16_tflops,
        }
        return peaks.get(dtype)


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_USUAL = {12: "RTX 3060 12GB", 16: "RTX 4080", 24: "RTX 4090", 48: "L40S"}
# Words that all makers' names contain and that tell nothing apart.
_NOISE = {"nvidia", "geforce", "tesla", "quadro", "gpu", "generation", "edition", "graphics", "card", "rtx"}


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu | None:
    """Return the GPU that a name means, ``None`` if none or if it is one that is not in the table.

    Takes what ``torch.cuda.get_device_name`` returns and what people type: ``NVIDIA A100-SXM4-80GB``, ``RTX 4090``,
    ``4060ti``. Every word must belong to the GPU, so laptop versions, which are slower, are not taken for the cards
    they are named after; ``RTX 6000`` alone, a name of three generations, finds none. Where several fit (``a100``),
    it is the one with the least memory, and of these the slowest: what fits it, fits all.
    Where ``memory_gib`` is known, it is the one that is nearest to it.
    """
    near_gib = memory_gib or 0.0
    return min(
        list_cards(name),
        key=lambda gpu: (abs(gpu.memory_gib - near_gib), gpu.fp16_tflops, gpu.bandwidth_gb_s),
        default=None,
    )


def list_cards(name: str) -> list[Gpu]:
    """Return all GPUs that a name can mean: several where it leaves memory or the kind of board open."""
    words = _split(name)
    wanted = [(gpu, *_list_words(gpu)) for gpu in GPUS]
    return [gpu for gpu, required, known in wanted if required <= words <= known]


def choose_usual_gpu(memory_gib: float) -> Gpu:
    """Return a usual GPU of a size, where only that is known."""
    name = next((name for size, name in _USUAL.items() if memory_gib <= size), "H100 SXM")
    return next(gpu for gpu in GPUS if gpu.name == name)


def suggest_gpus(name: str) -> list[str]:
    """Return the names of up to 3 GPUs that ``name`` might have been meant to be, nearest first, at least one."""
    typed = " ".join(sorted(_split(name) - _NOISE))
    keys: dict[str, str] = {}
    for gpu in GPUS:
        keys.setdefault(" ".join(sorted(_list_words(gpu)[0] - _NOISE)), gpu.name)
    near = difflib.get_close_matches(typed, keys, n=3, cutoff=0.0)
    return [keys[key] for key in near]


def parse_memory(text: str, setting: str = "device_memory", example: str = "16GiB") -> int:
    """Translate a memory size with a unit into bytes.

    Args:
        text: What a user wrote.
        setting: Where, for errors.
        example: Of what is expected.

    Raises:
        ValueError: It has no unit that is known, or is not above 0.
    """
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ValueError(
            f"{setting}: got {text!r}: expected a number and one of {', '.join(_UNITS)}, such as {example}"
        )
    num_bytes = round(float(found[1]) * units[found[2].lower()])
    if num_bytes < 1:
        raise ValueError(f"{setting}: got {text!r}: expected more than nothing, such as {example}")
    return num_bytes


def _split(name: str) -> frozenset[str]:
    text = re.sub(r"(\d+) ?(gb|gib)\b", r" \1gb ", name.lower())
    text = re.sub(r"\b(rtx|gtx|titan|pro)(?=\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super|ada)\b", r" \1", text)
    text = re.sub(r"\b(sxm|hbm)\d\w?\b", r"\1", text)
    return frozenset(re.findall(r"[a-z0-9]+", text))


@cache
def _list_words(gpu: Gpu) -> tuple[frozenset[str], frozenset[str]]:
    """Return the words that a name must contain to mean this GPU, and all that it may contain."""
    words = _split(gpu.name)
    optional = {word for word in words if re.fullmatch(r"\d+gb|sxm|pcie", word)}
    if "quadro" not in words:  # an RTX 6000 can be of three generations
        optional |= words & _NOISE
    hbm = {"hbm"} if gpu.name == "H100 SXM" else set()  # as its driver says
    return words - optional, words | _NOISE | hbm | {f"{gpu.memory_gib:g}gb"}


def _scale(rows: Iterable[tuple[str, float, float, float]], *, tf32: float, half: float) -> list[Gpu]:
    """Return GPUs from name, memory, bandwidth and float32; the others are multiples of that."""
    return [Gpu(n, m, b, f, round(f * tf32, 1), round(f * half, 1), round(f * half, 1)) for n, m, b, f in rows]


_GEFORCE = _scale(
    [  # GA102 white paper and product pages
        ("RTX 3050 8GB", 8, 224, 9.1),
        ("RTX 3060 12GB", 12, 360, 12.7),
        ("RTX 3060 Ti", 8, 448, 16.2),
        ("RTX 3070", 8, 448, 20.3),
        ("RTX 3070 Ti", 8, 608, 21.7),
        ("RTX 3080 10GB", 10, 760, 29.8),
        ("RTX 3080 12GB", 12, 912, 30.6),
        ("RTX 3080 Ti", 12, 912, 34.1),
        ("RTX 3090", 24, 936, 35.6),
        ("RTX 3090 Ti", 24, 1008, 40.0),
        # Ada
        ("RTX 4060", 8, 272, 15.1),
        ("RTX 4060 Ti 8GB", 8, 288, 22.1),
        ("RTX 4060 Ti 16GB", 16, 288, 22.1),
        ("RTX 4070", 12, 504, 29.1),
        ("RTX 4070 Super", 12, 504, 35.5),
        ("RTX 4070 Ti", 12, 504, 40.1),
        ("RTX 4070 Ti Super", 16, 672, 44.1),
        ("RTX 4080", 16, 717, 48.7),
        ("RTX 4080 Super", 16, 736, 52.2),
        ("RTX 4090", 24, 1008, 82.6),
        # RTX Blackwell
        ("RTX 5070", 12, 672, 30.9),
        ("RTX 5070 Ti", 16, 896, 43.9),
        ("RTX 5080", 16, 960, 56.3),
        ("RTX 5090", 32, 1792, 104.8),
    ],
    tf32=1,
    half=2,
)
_WORKSTATION = _scale(
    [  # Ampere
        ("RTX A2000 6GB", 6, 288, 8.0),
        ("RTX A2000 12GB", 12, 288, 8.0),
        ("RTX A4000", 16, 448, 19.2),
        ("RTX A4500", 20, 640, 23.7),
        ("RTX A5000", 24, 768, 27.8),
        ("RTX A5500", 24, 768, 34.1),
        ("RTX A6000", 48, 768, 38.7),
        ("A40", 48, 696, 37.4),
        # Ada
        ("RTX 4000 Ada", 20, 360, 26.7),
        ("RTX 4500 Ada", 24, 432, 39.6),
        ("RTX 5000 Ada", 32, 576, 65.3),
        ("RTX 6000 Ada", 48, 960, 91.1),
    ],
    tf32=2,
    half=4,
)
_TURING_AND_VOLTA = [  # no TF32 and no bfloat16 in their tensor cores
    Gpu("RTX 2080 Ti", 11, 616, 13.4, None, None, 53.8),
    Gpu("Titan RTX", 24, 672, 16.3, None, None, 130.5),
    Gpu("Quadro RTX 6000", 24, 672, 16.3, None, None, 130.5),
    Gpu("Quadro RTX 8000", 48, 672, 16.3, None, None, 130.5),
    Gpu("T4", 16, 320, 8.1, None, None, 65.0),
    Gpu("V100 PCIe 16GB", 16, 900, 14.0, None, None, 112.0),
    Gpu("V100 PCIe 32GB", 32, 900, 14.0, None, None, 112.0),
    Gpu("V100 SXM 16GB", 16, 900, 15.7, None, None, 125.0),
    Gpu("V100 SXM 32GB", 32, 900, 15.7, None, None, 125.0),
    Gpu("V100S PCIe 32GB", 32, 1134, 16.4, None, None, 130.0),
]
_DATA_CENTER = [
    Gpu("A10", 24, 600, 31.2, 62.5, 125.0, 125.0),
    Gpu("A30", 24, 933, 10.3, 82.0, 165.0, 165.0),
    Gpu("A100 PCIe 40GB", 40, 1555, 19.5, 156.0, 312.0, 312.0),
    Gpu("A100 SXM 40GB", 40, 1555, 19.5, 156.0, 312.0, 312.0),
    Gpu("A100 PCIe 80GB", 80, 1935, 19.5, 156.0, 312.0, 312.0),
    Gpu("A100 SXM 80GB", 80, 2039, 19.5, 156.0, 312.0, 312.0),
    Gpu("L4", 24, 300, 30.3, 60.0, 121.0, 121.0),
    Gpu("L40", 48, 864, 90.5, 90.5, 181.0, 181.0),
    Gpu("L40S", 48, 864, 91.6, 183.0, 362.0, 362.0),
    Gpu("H100 PCIe", 80, 2000, 51.0, 378.0, 756.0, 756.0),
    Gpu("H100 SXM", 80, 3350, 67.0, 494.5, 989.5, 989.5),
    Gpu("H100 NVL", 94, 3938, 60.0, 417.5, 835.5, 835.5),
    Gpu("H200 SXM", 141, 4800, 67.0, 494.5, 989.5, 989.5),
    Gpu("H200 NVL", 141, 4800, 60.0, 417.5, 835.5, 835.5),
]
GPUS = (*_GEFORCE, *_WORKSTATION, *_TURING_AND_VOLTA, *_DATA_CENTER)

# Of the peak, what large products in bfloat16 were measured to reach, the best of many shapes: by stas00/ml-engineering
# (A100 and H100 SXM) and mag-/gpu_benchmark (the others). Above 1 where cards boost beyond their reference clock.
_PRODUCT_SHARES = (
    (r"RTX \d+ Ada", 0.76),  # RTX 6000 Ada: 0.76, RTX 4000 Ada: 0.77; before GeForce cards, whose names begin alike
    (r"RTX [34]0", 1.08),  # RTX 3090: 1.10, 3090 Ti: 1.08, 4090: 1.08
    (r"A100", 0.86),
    (r"H\d00 SXM", 0.80),
    (r"H\d00 PCIe", 0.66),
    (r"H\d00 NVL", 0.58),
    (r"L40S", 0.70),
    (r"L40", 0.94),
    (r"L4", 0.75),
    (r"RTX A\d|A40", 0.85),  # RTX A5000
)
_USUAL_SHARE = 0.8
# GB/s of copies between pinned memory and the card, where that is not by PCI Express 4 with 16 lanes: about 0.63 of
# what the version has, as taken for that one.
_HOST_LINKS = (
    (r"H\d00|RTX 50[789]0", 40.0),  # version 5; not RTX 5000 Ada
    (r"V100|T4|Titan|Quadro|RTX 20", 10.0),  # version 3
    (r"RTX (3050|4060)", 10.0),  # 8 lanes
)


def get_product_share(gpu: Gpu) -> float:
    """Return what large products in half precision reach of the peak of a GPU, measured where that was found."""
    return next((share for pattern, share in _PRODUCT_SHARES if re.search(pattern, gpu.name)), _USUAL_SHARE)
