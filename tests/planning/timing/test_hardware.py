"""Names of GPUs, as drivers and people write them, and what their data sheets say."""

import pytest

from lit_fsdp.planning.timing.hardware import GPUS, find_gpu, get_product_share, list_cards, suggest_gpus

# As torch.cuda.get_device_name gives them, and short ones that people type.
NAMES = {
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti 8GB",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX 4070 Ti Super",
    "NVIDIA GeForce RTX 2080 Ti": "RTX 2080 Ti",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA L40S": "L40S",
    "NVIDIA L4": "L4",
    "NVIDIA A10": "A10",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "NVIDIA TITAN RTX": "Titan RTX",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100 SXM 16GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "rtx4090": "RTX 4090",
    "4060ti": "RTX 4060 Ti 8GB",
    "rtx 4060 ti 16 gb": "RTX 4060 Ti 16GB",
    "3080": "RTX 3080 10GB",
    "a100": "A100 PCIe 40GB",
    "H100": "H100 PCIe",
    "v100": "V100 PCIe 16GB",
}
NONE = (
    "",
    "rtx",
    "gpu",
    "80gb",
    "NVIDIA GeForce RTX 3060 Laptop GPU",
    "RTX 4090 D",
    "A100 24GB",
    "RTX 6000",
    "4091",
    "NVIDIA A10G",
)


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_a_name_finds_its_gpu(name: str, expected: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.name == expected


@pytest.mark.parametrize("name", NONE)
def test_a_name_that_means_no_gpu_or_a_slower_one_finds_none(name: str) -> None:
    assert find_gpu(name) is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_finds_itself(gpu: object) -> None:
    assert find_gpu(gpu.name) is gpu  # type: ignore[attr-defined]


def test_memory_tells_cards_of_one_name_apart() -> None:
    for memory_gib, expected in ((7.6, "RTX 4060 Ti 8GB"), (15.6, "RTX 4060 Ti 16GB")):
        gpu = find_gpu("NVIDIA GeForce RTX 4060 Ti", memory_gib)
        assert gpu is not None
        assert gpu.name == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H100", ["H100 PCIe", "H100 SXM"]),
        ("A100 80GB", ["A100 PCIe 80GB", "A100 SXM 80GB"]),
        ("H100 SXM", ["H100 SXM"]),
        ("RTX 4090", ["RTX 4090"]),
        ("H1000", []),
    ],
)
def test_all_cards_that_a_name_can_mean_are_known(name: str, expected: list[str]) -> None:
    assert [card.name for card in list_cards(name)] == expected


def test_figures_are_dense_and_of_float32_accumulation() -> None:
    peaks = {gpu.name: gpu.bf16_tflops for gpu in GPUS}
    assert (peaks["RTX 4090"], peaks["RTX 3090"], peaks["A100 SXM 80GB"]) == (165.2, 71.2, 312.0)
    assert (peaks["RTX 6000 Ada"], peaks["H100 SXM"], peaks["T4"]) == (364.4, 989.5, None)
    for gpu in GPUS:
        assert gpu.fp32_tflops <= (gpu.tf32_tflops or gpu.fp32_tflops) <= gpu.fp16_tflops
        assert gpu.get_peak_tflops("float32") == gpu.fp32_tflops
        assert gpu.get_peak_tflops("float64") is None


def test_workstation_cards_are_not_taken_for_the_geforce_cards_whose_names_begin_alike() -> None:
    ada = [gpu for gpu in GPUS if gpu.name.endswith(" Ada")]
    assert [(get_product_share(gpu), gpu.host_link_gb_s) for gpu in ada] == [(0.76, 20.0)] * 4
    others = {gpu.name: (get_product_share(gpu), gpu.host_link_gb_s) for gpu in GPUS}
    assert (others["RTX 4090"], others["RTX 5090"]) == ((1.08, 20.0), (0.8, 40.0))


def test_error_correction_takes_a_sixteenth_where_it_is_on() -> None:
    reported_mib = {"T4": 15360, "A10": 23028, "A40": 46068, "L4": 23034, "L40S": 46068}  # by nvidia-smi
    reported_mib |= {"RTX 4090": 24564, "RTX A6000": 49140, "A100 SXM 80GB": 81920, "H100 SXM": 81559}
    usable_gib = {gpu.name: gpu.usable_gib for gpu in GPUS}
    for name, mib in reported_mib.items():
        assert usable_gib[name] == pytest.approx(mib / 1024, rel=0.005)


def test_a_name_that_is_wrong_is_answered_with_near_ones() -> None:
    assert suggest_gpus("RTX 4900")[0] == "RTX 4090"
    assert suggest_gpus("h1000")[0] == "H100 PCIe"
    assert len(suggest_gpus("something else")) == 3
