"""What an engine will take on a machine, and the sizes that fit where the user left them open.

A plan is a function of the options, the facts of the model and what the machine has: nothing is loaded, and
the same facts give the same plan everywhere. Only options that are 0 or auto are chosen. What was given
stays, and if it cannot fit, the plan says so with the numbers and names the nearest sizes that do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from .calibration import Calibration
from .engine.context import BITS, UBATCH
from .engine.machine import SHARE_OF_RAM, Gpu, Machine, this_machine
from .errors import DoesNotFit
from .gguf_info import ModelInfo
from .settings import Settings
from .sizing import Costs, Needs, Sizes

STEP: Final = 256  # tokens: views are chosen in these steps, as llama.cpp makes cells
LEAST_VIEW: Final = 1024  # tokens: a smaller one holds a question and little else
LEAST_VIEW_ON_GPU: Final = 8192  # tokens: a larger one is not worth layers that compute on the CPU
LARGEST_SLOW_VIEW: Final = 4096  # tokens: of a model whose weights do not fit
UBATCHES_CPU: Final = (UBATCH, 64, 32)  # tokens; smaller ones only where nothing else fits
UBATCHES_GPU: Final = (512, 256, *UBATCHES_CPU)


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of an engine. `settings` are the given ones with what was left open filled in."""

    settings: Settings
    n_view: int  # tokens
    n_ubatch: int  # tokens
    n_gpu_layers: int  # those that are on the GPU, the output counted as one
    host_budget: int  # bytes
    needs: Needs
    free: int | None  # bytes of RAM that may be used; None: not known
    gpu_free: int  # bytes
    disk_tokens: int  # that durable workspaces still have room for
    reasons: Mapping[str, str]  # why a size is what it is, by its name
    costs: Costs
    remarks: tuple[str, ...]  # what a user may want to know
    warnings: tuple[str, ...]  # of these, what changes how well it works
    refusal: str = ""  # why it does not fit; empty: it does
    can_run: bool = True  # though the weights may have to be read from disk again and again
    nearest: tuple[str, ...] = ()  # what would fit

    @property
    def fits(self) -> bool:
        return not self.refusal

    def check(self) -> Plan:
        """The plan, if it can be run at all. Raises DoesNotFit, with the numbers and what fits."""
        if not self.can_run:
            raise DoesNotFit(self.refusal, hint=self.advice)
        return self

    @property
    def advice(self) -> str:
        """What to do about a refusal."""
        if not self.nearest:
            return "Use a smaller or more strongly quantized model, or free some memory."
        return f"These fit: {'; '.join(self.nearest)}."


def make_plan(
    settings: Settings, info: ModelInfo, machine: Machine, calibration: Calibration | None = None
) -> Plan:
    """The plan for a model on a machine. It may say that nothing fits (Plan.refusal); nothing is raised but
    InvalidOption, for options that contradict each other."""
    return _Planner(settings, info, machine, calibration).plan()


class _Planner:
    def __init__(
        self, settings: Settings, info: ModelInfo, machine: Machine, calibration: Calibration | None
    ) -> None:
        self._settings, self._info, self._machine = settings, info, machine
        self._sizes = Sizes(settings, info, machine)
        self._costs = Costs.of(settings, info, calibration)
        scale = settings.rope_freq_scale
        self._n_train = int(info.n_ctx_train / scale) if 0 < scale < 1 else info.n_ctx_train
        self._gpu = max(machine.gpus, key=lambda gpu: gpu.free, default=None)
        self._reasons: dict[str, str] = {}
        self._remarks: list[str] = []
        self._warnings: list[str] = []
        # The system and other programs need some of what is free now.
        margin = min(machine.total // 20, 512 << 20)
        self._free = None if machine.free is None else max(machine.free - margin, 0)
        self._gpu_free = max(self._gpu.free - (self._gpu.total // 20), 0) if self._gpu else 0

    def plan(self) -> Plan:
        n_layers = self._layers()
        n_view, n_layers, n_ubatch = self._choose(n_layers)
        needs = self._sizes.needs(n_view, n_layers, n_ubatch)
        host_budget = self._host_budget(needs)
        refusal = self._refusal(n_view, needs, n_layers)
        self._explain(n_view, n_layers, n_ubatch, needs)
        return Plan(
            settings=self._filled(n_view, n_layers, n_ubatch, host_budget),
            n_view=n_view,
            n_ubatch=n_ubatch,
            n_gpu_layers=n_layers,
            host_budget=host_budget,
            needs=needs,
            free=self._free,
            gpu_free=self._gpu_free,
            disk_tokens=int(self._machine.disk_free / max(self._costs.disk, 1)),
            reasons=dict(self._reasons),
            costs=self._costs,
            remarks=tuple(self._warnings + self._remarks),
            warnings=tuple(self._warnings),
            refusal=refusal,
            can_run=not refusal or self._runs(needs),
            nearest=self._nearest(n_view, n_layers, n_ubatch) if refusal else (),
        )

    def _fits(self, needs: Needs) -> bool:
        return self._fits_ram(needs) and needs.n_gpu <= self._gpu_free

    def _fits_ram(self, needs: Needs) -> bool:
        return self._free is None or needs.n_memory + needs.least_records <= self._free

    def _runs(self, needs: Needs) -> bool:
        """It can be run, though weights may have to be read from disk again and again."""
        in_ram = self._free is None or needs.n_host + needs.least_records <= self._free
        return in_ram and needs.n_gpu <= self._gpu_free

    # -- choices

    def _layers(self) -> int | None:
        """Layers on the GPU; None: as many as fit."""
        given = self._settings.n_gpu_layers
        if given == 0:
            return 0
        if self._gpu is None:
            if given != -1:
                self._warnings.append("-ngl has no effect: this build of llama.cpp finds no GPU")
            self._reasons["gpu_layers"] = "there is no GPU that this build of llama.cpp can use"
            return 0
        every = self._info.n_layer + 1
        return {-1: None, -2: every}.get(given, min(given, every))

    def _choose(self, n_layers: int | None) -> tuple[int, int, int]:
        """(view, layers on the GPU, ubatch). If nothing fits, the least that was asked for."""
        settings, every = self._settings, self._info.n_layer + 1
        top = min(settings.n_ctx or self._n_train, self._n_train)
        low = top if settings.n_ctx else min(LEAST_VIEW, top)
        if n_layers is None:
            aim = top if settings.n_ctx else min(LEAST_VIEW_ON_GPU, top)
            found = self._largest_view(aim, top, every, self._fits)
            if found is not None:
                return found[0], every, found[1]
            n_ubatch, top = settings.n_ubatch or UBATCH, aim
            n_layers = _largest(0, every, 1, lambda n: self._fits_gpu(aim, n, n_ubatch)) or 0
        found = self._largest_view(low, top, n_layers, self._fits)
        # If even the weights do not fit, every cell takes the place of some of them.
        found = found or self._largest_view(low, min(top, max(low, LARGEST_SLOW_VIEW)), n_layers, self._runs)
        view, n_ubatch = found or (low, self._ubatches(n_layers)[-1])
        return view, n_layers, n_ubatch

    def _fits_gpu(self, n_view: int, n_layers: int, n_ubatch: int) -> bool:
        return self._sizes.needs(n_view, n_layers, n_ubatch).n_gpu <= self._gpu_free

    def _largest_view(
        self, low: int, top: int, n_layers: int, test: Callable[[Needs], bool]
    ) -> tuple[int, int] | None:
        """The largest view from `low` to `top` that passes, and the batch to use; None: not even `low`."""
        for n_ubatch in self._ubatches(n_layers):
            view = _largest(low, top, STEP, functools.partial(self._passes, test, n_layers, n_ubatch))
            if view is not None:
                return view, n_ubatch
        return None

    def _passes(self, test: Callable[[Needs], bool], n_layers: int, n_ubatch: int, n_view: int) -> bool:
        return test(self._sizes.needs(n_view, n_layers, n_ubatch))

    def _ubatches(self, n_layers: int) -> tuple[int, ...]:
        """Sizes of batches in the order in which they are tried."""
        if self._settings.n_ubatch:
            return (self._settings.n_ubatch,)
        return UBATCHES_GPU if n_layers > self._info.n_layer else UBATCHES_CPU

    def _host_budget(self, needs: Needs) -> int:
        """RAM for the records of durable workspaces."""
        given, quarter = self._settings.host_budget, self._machine.total // SHARE_OF_RAM
        left = None if self._free is None else max(self._free - needs.n_memory, needs.least_records)
        if given:
            self._reasons["host_budget"] = "as given"
            if left is not None and given > left:
                self._remarks.append(
                    f"--host-budget is {_size(given)}, {_size(left)} are free beside the rest"
                )
            return given
        if left is None or quarter <= left:
            self._reasons["host_budget"] = f"a quarter of {_size(self._machine.total)} of RAM"
            return quarter
        self._reasons["host_budget"] = (
            f"what is left beside the rest; a quarter of the RAM is {_size(quarter)}"
        )
        return left

    def _filled(self, n_view: int, n_layers: int, n_ubatch: int, host_budget: int) -> Settings:
        settings = self._settings
        changed: dict[str, Any] = {}
        if not settings.n_ctx and n_view < self._n_train:
            changed["n_ctx"] = n_view
        if settings.n_gpu_layers == -1:
            changed["n_gpu_layers"] = n_layers
        if not settings.n_ubatch:
            changed["n_ubatch"] = n_ubatch
        if not settings.host_budget and host_budget != self._machine.total // SHARE_OF_RAM:
            changed["host_budget"] = host_budget
        return replace(settings, **changed) if changed else settings

    # -- what is said

    def _explain(self, n_view: int, n_layers: int, n_ubatch: int, needs: Needs) -> None:
        settings, machine, info = self._settings, self._machine, self._info
        if settings.n_ctx:
            cut = settings.n_ctx > self._n_train
            self._reasons["view"] = "the window the model was trained with" if cut else "as given"
        elif n_view == self._n_train:
            self._reasons["view"] = "the window the model was trained with"
        else:
            where = "GPU" if needs.gpu and not self._is_bound_by_host(n_view, n_layers, n_ubatch) else "RAM"
            self._reasons["view"] = (
                f"the largest that fits {where}; the model was trained with {self._n_train:,} tokens"
            )
            self._warnings.append(
                f"the view is {n_view:,} of the {self._n_train:,} tokens the model was trained with: more "
                f"does not fit {where} (-c sets it)"
            )
        self._reasons["batch"] = "as given" if settings.n_ubatch else "for this machine"
        if settings.n_gpu_layers and self._gpu is not None:
            every = info.n_layer + 1
            self._reasons["gpu_layers"] = (
                "as given" if settings.n_gpu_layers != -1
                else f"all fit {self._gpu.name}" if n_layers == every
                else f"of {every}; more do not fit {_size(self._gpu_free)} of {self._gpu.name}"
            )  # fmt: skip
        if self._free is None:
            self._remarks.append("how much memory is free is not known here, so nothing was made smaller")
        else:
            self._remarks += self._remarks_on_ram(needs)
        least = settings.block_size * self._costs.disk * settings.segment_records
        if machine.disk_free < least:
            self._remarks.append(
                f"the disk has room for no durable workspace (-w): {_size(machine.disk_free)} are free, a "
                f"segment takes {_size(int(least))}"
            )
        if machine.cores == 1:
            self._remarks.append("one core: reading is slow, and commits wait for the disk")

    def _is_bound_by_host(self, n_view: int, n_layers: int, n_ubatch: int) -> bool:
        return not self._fits_ram(self._sizes.needs(n_view + STEP, n_layers, n_ubatch))

    def _remarks_on_ram(self, needs: Needs) -> list[str]:
        machine, remarks = self._machine, []
        assert self._free is not None
        if machine.is_limited:
            remarks.append(f"a control group (container) limits the RAM to {_size(machine.total)}")
        elif (machine.free or 0) < machine.total // 2:
            remarks.append(
                f"other programs use much of the RAM: {_size(machine.free or 0)} of {_size(machine.total)} "
                "are free"
            )
        if not self._fits(needs) and self._runs(needs):
            self._warnings.append(
                f"the weights ({_size(needs.mapped)}) do not fit into RAM beside the rest: they are read "
                "from disk again and again, which is very slow"
            )
        return remarks

    def _refusal(self, n_view: int, needs: Needs, n_layers: int) -> str:
        if self._free is not None and not self._fits_ram(needs):
            parts = {"weights": needs.mapped, **needs.host, "records of one view": needs.least_records}
            what = _largest_parts(parts)
            total = needs.n_memory + needs.least_records
            needed, free = _size(total), _size(self._free)
            return f"a view of {n_view:,} tokens needs {needed} of RAM ({what}), {free} can be used"
        if needs.gpu and needs.n_gpu > self._gpu_free:
            what = _largest_parts(needs.gpu)
            return (
                f"{n_layers} layers with a view of {n_view:,} tokens need {_size(needs.n_gpu)} of the GPU "
                f"({what}), {_size(self._gpu_free)} can be used"
            )
        return ""

    def _nearest(self, n_view: int, n_layers: int, n_ubatch: int) -> tuple[str, ...]:
        """Command-line options that would fit, the nearest first."""
        found = []
        view = _largest(
            LEAST_VIEW, n_view, STEP, lambda n: self._fits(self._sizes.needs(n, n_layers, n_ubatch))
        )
        if view is not None and view < n_view:
            found.append(f"-c {view}")
        if n_layers:
            fewer = _largest(0, n_layers, 1, lambda n: self._fits_gpu(n_view, n, n_ubatch)) or 0
            if fewer < n_layers and self._fits(self._sizes.needs(n_view, fewer, n_ubatch)):
                found.append(f"-ngl {fewer}")
        if self._settings.cache_type_k == self._settings.cache_type_v == "f16":
            bits = (BITS["q8_0"], BITS["q8_0"])
            view = _largest(
                LEAST_VIEW, n_view, STEP,
                lambda n: self._fits(self._sizes.needs(n, n_layers, n_ubatch, bits)),
            )  # fmt: skip
            if view is not None:
                found.append(f"-c {view} -ctk q8_0 -ctv q8_0")
        return tuple(found)


def _largest(low: int, top: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """The largest of low, multiples of `step` above it, and top that fits; None: not even `low`. `fits` must
    hold for all numbers below one for which it holds."""
    if fits(top):
        return top
    if low >= top or not fits(low):
        return None
    good, bad = low // step, -(-top // step)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * step) else (good, middle)
    return max(good * step, low)


def _largest_parts(parts: Mapping[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name.replace('_', ' ')} {_size(n)}" for name, n in ordered)


def _size(n_bytes: int) -> str:
    """For a person: 1.2 GB, 340 MB."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def machine_for(settings: Settings) -> Machine:
    """This machine as it is now; its GPUs only where layers are to go there. Raises LibraryError."""
    gpus: list[Gpu] = []
    if settings.n_gpu_layers:
        from .native import library
        from .native.devices import gpu_memory

        gpus = [Gpu(*facts) for facts in gpu_memory(library.load().path)]
    return this_machine(settings.data_path, gpus)
