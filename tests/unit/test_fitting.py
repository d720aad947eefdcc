"""Plans for machines that are made up: they fit, and say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvmem_llama.engine.machine import Gpu, Machine
from kvmem_llama.errors import DoesNotFit
from kvmem_llama.fitting import STEP, UBATCHES_GPU, Plan, make_plan
from kvmem_llama.gguf_info import ModelInfo
from kvmem_llama.settings import Settings
from kvmem_llama.sizing import Sizes

GB = 10**9

SMALL = ModelInfo(
    path=Path("small.gguf"), arch="llama", name="small", n_layer=30, n_embd=576, n_head=9,
    n_head_kv=(3,) * 30, d_k=64, d_v=64, n_ctx_train=8192, n_swa=0, n_vocab=49152, tokenizer="gpt2",
    has_chat_template=True, learned_positions=False, causal=True, file_size=98_000_000, n_parts=1,
    n_params=134_515_008, quantisation="Q4_1", fingerprint="0", n_ff=1536, n_merges=48_900,
    layers_size=66_000_000, matrix_sizes=(("Q4_1", 66_000_000),),
)  # fmt: skip
LARGE = replace(  # 8 billion parameters, trained with 131,072 tokens
    SMALL, name="large", n_layer=32, n_embd=4096, n_head=32, n_head_kv=(8,) * 32, d_k=128, d_v=128,
    n_ctx_train=131_072, n_vocab=128_256, file_size=4_920_000_000, n_params=8_030_000_000,
    quantisation="Q4_K", n_ff=14_336, n_merges=280_147, layers_size=4_150_000_000,
    matrix_sizes=(("Q4_K", 3_300_000_000), ("Q6_K", 1_300_000_000)),
)  # fmt: skip

AVX2 = frozenset({"Q4_0", "Q4_K"})
LAPTOP = Machine(total=16 * GB, free=13 * GB, disk_free=200 * GB, cores=8, repacked=AVX2)


def planned(info: ModelInfo, machine: Machine, **options: object) -> Plan:
    plan = make_plan(Settings(**options), info, machine)  # type: ignore[arg-type]
    assert plan == make_plan(Settings(**options), info, machine)  # type: ignore[arg-type]
    if plan.fits:
        assert_it_fits(plan, machine)
    return plan


def assert_it_fits(plan: Plan, machine: Machine) -> None:
    assert machine.free is None or plan.needs.n_memory + plan.needs.least_records <= machine.free
    assert plan.needs.n_gpu <= max((gpu.free for gpu in machine.gpus), default=0)
    limits = (machine.total // 4, plan.needs.least_records, plan.settings.host_budget)
    assert plan.host_budget <= max(limits)
    for name in ("view", "batch", "host_budget"):
        assert plan.reasons[name]


def test_a_small_model_has_its_trained_window_and_nothing_is_changed() -> None:
    plan = planned(SMALL, LAPTOP)
    assert plan.settings == Settings() and plan.n_view == 8192 and plan.remarks == ()
    assert plan.reasons["view"] == "the window the model was trained with"
    assert plan.reasons["host_budget"] == "a quarter of 16.0 GB of RAM"


def test_4_gb_of_ram_take_a_small_model_and_a_smaller_budget_for_records() -> None:
    machine = Machine(total=4 * GB, free=int(1.5 * GB), disk_free=20 * GB, cores=2)
    plan = planned(SMALL, machine)
    assert plan.fits and plan.n_view == 8192
    assert plan.settings.host_budget == plan.host_budget < GB
    assert plan.reasons["host_budget"] == "what is left beside the rest; a quarter of the RAM is 1.0 GB"
    assert plan.remarks == ("other programs use much of the RAM: 1.5 GB of 4.0 GB are free",)


def test_4_gb_of_ram_do_not_take_a_large_model_and_the_numbers_are_said() -> None:
    plan = planned(LARGE, Machine(total=4 * GB, free=3 * GB, disk_free=20 * GB, cores=4, repacked=AVX2))
    assert not plan.fits and not plan.can_run and plan.nearest == ()
    assert plan.refusal == (
        "a view of 1,024 tokens needs 8.8 GB of RAM (weights 4.9 GB, repacked weights 3.3 GB, cells 168 MB), "
        "2.8 GB can be used"
    )
    with pytest.raises(DoesNotFit, match="a smaller or more strongly quantized model"):
        plan.check()


def test_8_gb_of_ram_run_a_large_model_from_disk_only_and_that_is_said() -> None:
    machine = Machine(total=8 * GB, free=int(6.5 * GB), disk_free=20 * GB, cores=4, repacked=AVX2)
    plan = planned(LARGE, machine)
    assert not plan.fits and plan.can_run and plan.check() is plan
    assert plan.n_view == 4096 and "they are read from disk again and again" in plan.warnings[1]
    without_copies = planned(LARGE, replace(machine, repacked=frozenset()))
    assert without_copies.fits and without_copies.n_view < LARGE.n_ctx_train


def test_16_gb_of_ram_take_a_part_of_a_long_window_in_one_line() -> None:
    plan = planned(LARGE, LAPTOP)
    assert plan.fits and 8192 < plan.n_view < LARGE.n_ctx_train and plan.n_view % STEP == 0
    assert plan.settings.n_ctx == plan.n_view
    assert plan.warnings == (
        f"the view is {plan.n_view:,} of the 131,072 tokens the model was trained with: more does not fit "
        "RAM (-c sets it)",
    )
    more = Sizes(Settings(), LARGE, LAPTOP).needs(plan.n_view + STEP, 0, 128)
    assert plan.free is not None and more.n_memory + more.least_records > plan.free  # it is the largest


def test_a_gpu_of_24_gb_takes_all_layers_and_larger_batches() -> None:
    machine = replace(LAPTOP, total=64 * GB, free=60 * GB, gpus=(Gpu("card", 24 * GB, 23 * GB),))
    plan = planned(LARGE, machine, n_gpu_layers=-1, n_ubatch=0)
    assert plan.fits and plan.n_gpu_layers == 33 and plan.n_ubatch == UBATCHES_GPU[0]
    assert plan.settings.n_gpu_layers == 33 and plan.reasons["gpu_layers"] == "all fit card"
    assert 65_536 < plan.n_view < LARGE.n_ctx_train and plan.needs.n_gpu > 20 * GB
    assert plan.warnings[0].endswith("more does not fit GPU (-c sets it)")
    assert plan.needs.mapped == 0


def test_a_gpu_smaller_than_the_weights_takes_some_layers() -> None:
    machine = replace(LAPTOP, total=32 * GB, free=30 * GB, gpus=(Gpu("card", 4 * GB, int(3.8 * GB)),))
    plan = planned(LARGE, machine, n_gpu_layers=-1)
    assert plan.fits and 0 < plan.n_gpu_layers < 32 and plan.n_view == 8192
    assert plan.reasons["gpu_layers"] == "of 33; more do not fit 3.6 GB of card"
    given = planned(LARGE, machine, n_gpu_layers=-2)
    assert not given.fits and not given.can_run
    assert "33 layers with a view of 1,024 tokens need" in given.refusal and "of the GPU" in given.refusal
    assert given.nearest[0] == f"-ngl {planned(LARGE, machine, n_gpu_layers=-1, n_ctx=1024).n_gpu_layers}"


def test_no_gpu_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(SMALL, LAPTOP, n_gpu_layers=-1)
    assert plan.fits and plan.settings.n_gpu_layers == 0 and plan.warnings == ()
    assert plan.reasons["gpu_layers"].startswith("there is no GPU")
    asked = planned(SMALL, LAPTOP, n_gpu_layers=10)
    assert asked.settings.n_gpu_layers == 10 and asked.warnings[0].startswith("-ngl has no effect")


def test_a_full_disk_leaves_no_room_for_durable_workspaces() -> None:
    plan = planned(SMALL, replace(LAPTOP, disk_free=10_000_000))
    assert plan.fits and plan.disk_tokens == 10_000_000 // 23_040
    assert plan.remarks == (
        "the disk has room for no durable workspace (-w): 10 MB are free, a segment takes 47 MB",
    )


def test_a_tiny_container_gets_a_smaller_view_and_batch() -> None:
    machine = Machine(total=400_000_000, free=380_000_000, disk_free=GB, cores=2, is_limited=True)
    plan = planned(SMALL, machine)
    assert plan.fits and 1024 <= plan.n_view < 8192 and plan.host_budget < 400_000_000 // 4
    assert "a control group (container) limits the RAM to 400 MB" in plan.remarks
    tiny = replace(machine, total=285_000_000, free=277_000_000)
    assert not planned(SMALL, tiny).fits
    plan = planned(SMALL, tiny, n_ubatch=0)
    assert plan.fits and plan.n_view == 1024 and plan.settings.n_ubatch == plan.n_ubatch < 128


def test_other_load_without_swap_leaves_less() -> None:
    plan = planned(LARGE, replace(LAPTOP, total=64 * GB, free=11 * GB))
    assert plan.fits and plan.n_view < planned(LARGE, replace(LAPTOP, total=64 * GB, free=60 * GB)).n_view
    assert "other programs use much of the RAM: 11.0 GB of 64.0 GB are free" in plan.remarks
    assert plan.settings.host_budget == plan.host_budget < 16 * GB


def test_one_core_is_said() -> None:
    plan = planned(SMALL, replace(LAPTOP, cores=1))
    assert plan.fits and plan.remarks == ("one core: reading is slow, and commits wait for the disk",)


def test_unknown_memory_changes_nothing() -> None:
    plan = planned(LARGE, replace(LAPTOP, free=None))
    assert plan.fits and plan.n_view == LARGE.n_ctx_train and plan.settings == Settings()
    assert "is not known here" in plan.remarks[0]


def test_what_was_given_is_never_changed_and_refused_with_what_would_fit() -> None:
    fitting = planned(LARGE, LAPTOP)
    plan = planned(LARGE, LAPTOP, n_ctx=131_072)
    assert plan.settings == Settings(n_ctx=131_072) and not plan.fits and not plan.can_run
    assert plan.nearest[0] == f"-c {fitting.n_view}"
    quantized = plan.nearest[1].split()
    assert quantized[2:] == ["-ctk", "q8_0", "-ctv", "q8_0"] and int(quantized[1]) > fitting.n_view
    with pytest.raises(DoesNotFit, match=f"These fit: -c {fitting.n_view}; -c {quantized[1]} -ctk q8_0"):
        plan.check()
    for n_ctx, cache in ((fitting.n_view, "f16"), (int(quantized[1]), "q8_0")):
        assert planned(LARGE, LAPTOP, n_ctx=n_ctx, cache_type_k=cache, cache_type_v=cache).fits
    assert planned(SMALL, LAPTOP, n_ctx=100_000).reasons["view"] == "the window the model was trained with"


def test_a_budget_larger_than_what_is_free_is_kept_and_said() -> None:
    plan = planned(SMALL, LAPTOP, host_budget=100 * GB)
    assert plan.host_budget == 100 * GB and plan.fits is True
    assert plan.remarks[0].startswith("--host-budget is 100.0 GB, ")


def test_more_of_anything_never_fits_less() -> None:
    views = [planned(LARGE, replace(LAPTOP, total=n * GB, free=n * GB)).n_view for n in range(10, 60, 5)]
    assert views == sorted(views) and views[-1] == LARGE.n_ctx_train
    layers = [
        planned(LARGE, replace(LAPTOP, gpus=(Gpu("card", n * GB, n * GB),)), n_gpu_layers=-1).n_gpu_layers
        for n in range(1, 12)
    ]
    assert layers == sorted(layers) and layers[0] < 3 and layers[-1] == 33
