"""One worker's numbers: forward, backward, update, snapshot, merge.

Owns a stage's weights in all their live versions, its optimiser and its averaging state. It decides
nothing: `protocol` says what to run, the simulator or the runtime calls. Invariants: a backward
uses the very buffer its forward used; an update writes a buffer that nobody reads; nothing in here
waits for the device, so a GPU is never drained by bookkeeping.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asyncmesh.algorithm import choice
from asyncmesh.algorithm.correction import METHODS, merge_
from asyncmesh.algorithm.gradient import clip_
from asyncmesh.algorithm.layout import FlatLayout
from asyncmesh.algorithm.muon import hidden_matrices
from asyncmesh.algorithm.subsets import gather
from asyncmesh.algorithm.versions import Version, VersionPool
from asyncmesh.config import Config
from asyncmesh.errors import StageError

LossFunction = Callable[[Tensor, Tensor], Tensor]
Tensors = dict[str, Tensor]


class StageProgram:
    """The code of a stage without its numbers: shared by all replicas, and compiled once.

    Runs any `nn.Module` on weights that are handed in, through `functional_call`. Swapping `p.data`
    would be wrong: autograd keeps the parameter itself, and a backward would read whatever version
    it points to by then.
    """

    def __init__(
        self, module: nn.Module, config: Config, device: torch.device, loss: LossFunction | None
    ) -> None:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        dtypes = {p.dtype for p in trained.values()}
        if len(dtypes) > 1:
            raise StageError(
                f"a stage's parameters share one flat buffer, so they need one dtype, not"
                f" {', '.join(sorted(map(str, dtypes)))}; convert the stage with .to(dtype)"
            )
        self.device = device
        self.layout = FlatLayout.of(trained.items())
        self._aliases = _aliases(module)
        self.matrices = hidden_matrices(module) & trained.keys()
        self.loss = loss
        self._trained = trained
        self._constants = {
            name: tensor.detach()
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if name not in trained
        }
        # What a state dict holds besides trained weights: tables that can be recomputed are not in
        # it.
        self.kept_constants = self._constants.keys() & module.state_dict().keys()
        self._training = copy.deepcopy(module).to("meta")
        self._evaluating = copy.deepcopy(self._training).eval()
        self._bfloat16 = config.train.dtype == "bfloat16"
        self.run = _compiled(self._run) if config.train.compile else self._run

    def initial_weights(self) -> Tensor:
        """A new flat buffer with the module's own parameters."""
        if not self._trained:
            return torch.zeros(0, device=self.device)
        pieces = [p.detach().reshape(-1).to(self.device) for p in self._trained.values()]
        return torch.cat(pieces)

    def constants(self) -> dict[str, Tensor]:
        """A worker's own copies of the buffers and frozen parameters."""
        return {name: t.to(self.device, copy=True) for name, t in self._constants.items()}

    def autocast(self) -> torch.autocast | nullcontext[None]:
        if self._bfloat16:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _run(
        self, weights: Tensors, constants: Tensors, x: Tensor, target: Tensor | None
    ) -> Tensor:
        output = self._call(self._training, weights, constants, x)
        return output if self.loss is None or target is None else self.loss(output, target)

    def _call(self, module: nn.Module, weights: Tensors, constants: Tensors, x: Tensor) -> Tensor:
        # Ties are resolved once, not searched for in every call as functional_call would.
        tied = {
            alias: weights[name] if name in weights else constants[name]
            for alias, name in self._aliases.items()
        }
        tensors = (weights, constants, tied)
        output: Tensor = functional_call(module, tensors, (x,), tie_weights=False)
        return output

    def with_aliases(self, tensors: Tensors) -> Tensors:
        """Also under their further names, as a state dict has them."""
        named = self._aliases.items()
        return tensors | {alias: tensors[name] for alias, name in named if name in tensors}

    def evaluate(
        self, flat: Tensor, constants: Tensors, x: Tensor, target: Tensor | None
    ) -> Tensor:
        """The output (the last stage: its loss) without gradients, in evaluation mode."""
        with torch.no_grad(), self.autocast():
            weights = self.layout.views(flat)
            output = self._call(self._evaluating, weights, constants, x.to(self.device))
            if self.loss is None or target is None:
                return output
            return self.loss(output, target.to(self.device))


@dataclass(eq=False)
class _InFlight:
    """A microbatch between its forward and its backward."""

    version: Version
    x: Tensor
    output: Tensor


class Engine:
    """The numbers of one worker."""

    def __init__(
        self, program: StageProgram, config: Config, stage: int, replica: int, mean_delay: float
    ) -> None:
        self.program, self.stage, self.replica = program, stage, replica
        self._seed = config.seed
        self._accumulation = config.pipeline.accumulation
        self._max_norm = config.optimizer.max_grad_norm
        self._of_gradients = METHODS[config.averaging.method].averages == "gradients"
        self._strength = config.averaging.strength
        initial = program.initial_weights()
        self._wire = wire_dtype(config.averaging.wire_dtype, initial.dtype)
        self.pool = VersionPool(program.layout)
        self.pool.start(initial)
        self._constants = program.constants()
        self._gradient = torch.zeros_like(initial)
        self._gradient_views = list(program.layout.views(self._gradient).values())
        self._microbatches = 0  # backwards since the last update
        self._learning_rate = choice.make_learning_rate(config, mean_delay)
        self._optimizer = choice.make_optimizer(
            config, initial, program.layout, program.matrices, mean_delay
        )
        self._partition = choice.make_partition(config, initial.numel(), stage)
        self._agreement, self._correction = choice.make_merge_rule(config, initial)
        self._in_flight: dict[int, _InFlight] = {}
        self._sent: dict[int, Tensor] = {}
        self.averaging_bytes = self._averaging_bytes_now()  # the most it ever took

    # -- pipeline axis ----------------------------------------------------------------------------
    def forward(self, microbatch: int, x: Tensor, target: Tensor | None = None) -> Tensor:
        """Run a microbatch on the newest version. With a target: the loss; else the output."""
        x = x.detach().to(self.program.device, non_blocking=True)
        if self.stage > 0 and x.is_floating_point():
            x.requires_grad_()
        if target is not None:
            target = target.to(self.program.device, non_blocking=True)
        self._seed_randomness(microbatch)
        version = self.pool.acquire()
        try:
            with self.program.autocast():
                output = self.program.run(version.leaves, self._constants, x, target)
        except RuntimeError as error:
            # The input is the root of the stage's graph and another stage's output.
            if x.requires_grad and "in-place operation" in str(error):
                raise StageError(
                    f"stage {self.stage} changes its input in place, which another stage computed"
                    " and still needs; make its first operation a copying one (inplace=False)"
                ) from error
            raise
        self._check_output(output, target is not None, x.requires_grad or bool(version.leaves))
        self._in_flight[microbatch] = _InFlight(version, x, output)
        return output.detach()

    def _check_output(self, output: object, is_loss: bool, is_trained: bool) -> None:
        if is_loss and (not isinstance(output, Tensor) or output.ndim):
            raise StageError(
                f"the loss returned {_described(output)}: training needs one number; return a"
                " tensor of no dimensions, such as a mean"
            )
        if not isinstance(output, Tensor):
            raise StageError(
                f"stage {self.stage} returned {type(output).__name__}: a stage hands one tensor to"
                " the next; return a single tensor"
            )
        if is_loss and is_trained and not output.requires_grad:
            raise StageError(
                "the loss has no gradient: nothing could be trained; compute it from the output"
                " without detach, item or no_grad"
            )

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Add a microbatch's gradient to the update's mean; returns the gradient of its input.

        Without `gradient` the output is the loss, and 1/k starts the chain: so the mean over the
        update's k microbatches needs no pass of its own, on any stage.
        """
        flight = self._in_flight.pop(microbatch)
        leaves = list(flight.version.leaves.values())
        if gradient is None and self.program.loss is not None:
            gradient = torch.full_like(flight.output, 1 / self._accumulation)
        wanted = [flight.x, *leaves] if flight.x.requires_grad else leaves
        grads: list[Tensor | None] = [None] * len(wanted)
        if flight.output.requires_grad and gradient is not None and wanted:
            gradient = gradient.to(self.program.device, non_blocking=True)
            # A hand-over to autograd's own thread for the device costs more than it brings here.
            with torch.autograd.set_multithreading_enabled(False):
                computed = torch.autograd.grad(
                    flight.output, wanted, gradient.to(flight.output.dtype), allow_unused=True
                )
            grads = list(computed)
        input_gradient = grads.pop(0) if flight.x.requires_grad else None
        self._accumulate(grads)
        self.pool.release(flight.version)
        return input_gradient

    def _accumulate(self, grads: list[Tensor | None]) -> None:
        if not grads:
            return
        filled = [
            torch.zeros_like(view) if g is None else g
            for g, view in zip(grads, self._gradient_views, strict=True)
        ]
        # The first microbatch overwrites, so the buffer is never cleared.
        if self._microbatches == 0:
            torch._foreach_copy_(self._gradient_views, filled)
        else:
            torch._foreach_add_(self._gradient_views, filled)
        self._microbatches += 1

    def update(self) -> float:
        """Make the next version from the mean gradient; returns the learning rate used."""
        newest, blank = self.pool.newest, self.pool.blank()
        lr = self._learning_rate(newest.number + 1)
        clip_(self._gradient, self._gradient_views, self._max_norm)
        with torch.no_grad():
            self._optimizer.apply(blank.flat, newest.flat, self._gradient, lr)
        self.pool.publish(blank)
        self._microbatches = 0
        return lr

    def _seed_randomness(self, microbatch: int) -> None:
        """Makes dropout a function of (seed, stage, replica, microbatch), whatever the timing."""
        key = f"{self._seed}/{self.stage}/{self.replica}/{microbatch}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest())
        # Straight to the generator: torch.manual_seed also records a stack trace for CUDA.
        if self.program.device.type == "cuda":
            torch.cuda.default_generators[self.program.device.index or 0].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    # -- data axis --------------------------------------------------------------------------------
    def snapshot(self, round_: int) -> Tensor:
        """What this worker contributes to a round, as it goes over the wire."""
        if self._of_gradients:
            return self._gradient.clone() if self._wire is None else self._gradient.to(self._wire)
        newest = self.pool.newest.flat
        sent = gather(newest, self._partition.indices(round_, newest.device))
        self._sent[round_] = sent
        payload = sent if self._wire is None else sent.to(self._wire)
        self.averaging_bytes = max(self.averaging_bytes, self._averaging_bytes_now())
        return payload

    def merge(self, round_: int, mean: Tensor, update: int) -> None:
        """Apply a round's mean to the newest version, which no forward has seen yet."""
        mean = mean.to(self._gradient)
        if self._of_gradients:
            self._gradient.copy_(mean)
            return
        sent = self._sent.pop(round_)
        # What the wire rounded off stays with the worker, or every merge would coarsen its weights.
        residual = None if self._wire is None else sent - sent.to(self._wire)
        merge_(
            self.pool.newest.flat,
            self._partition.indices(round_, mean.device),
            sent,
            mean,
            update,
            self._agreement,
            self._correction,
            self._strength,
            residual,
        )

    def blank_offer(self, round_: int) -> Tensor:
        """Zeros of the size of what this worker would contribute to a round."""
        if self._of_gradients:
            like = self._gradient
        else:
            newest = self.pool.newest.flat
            like = gather(newest, self._partition.indices(round_, newest.device))
        return torch.zeros_like(like, dtype=self._wire or like.dtype)

    # -- moving it to another worker --------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        """Copies of all that another worker needs to go on from here, by name."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    @property
    def state_bytes(self) -> int:
        return sum(map(_bytes, self._state().values()))

    def resume(self, state: Mapping[str, Tensor], update: int) -> None:
        """Go on from another worker's `state()` as if so many updates had been made."""
        for name, tensor in self._state().items():
            tensor.copy_(state[name])
        self.pool.newest.number = update
        self._optimizer.count_from(update)

    def _state(self) -> dict[str, Tensor]:
        parts = {
            "optimizer": self._optimizer.state(),
            "agreement": self._agreement.state(),
            "correction": self._correction.state(),
        }
        named = {
            f"{part}.{k}": tensor for part, held in parts.items() for k, tensor in held.items()
        }
        constants = {f"constant.{name}": self._constants[name] for name in self._constants}
        return {"weights": self.pool.newest.flat, **named, **constants}

    # -- what it holds ----------------------------------------------------------------------------
    def newest_weights(self) -> Tensor:
        """A copy of the newest version's flat buffer."""
        return self.pool.newest.flat.clone()

    def named_weights(self) -> dict[str, Tensor]:
        """The newest version as copies, by name, with persistent buffers and frozen parameters."""
        return self.named(self.newest_weights())

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat buffer's tensors by name, with copies of what belongs to no version."""
        kept = {name: self._constants[name].clone() for name in self.program.kept_constants}
        return self.program.with_aliases(self.program.layout.views(flat) | kept)

    @property
    def constants(self) -> dict[str, Tensor]:
        return self._constants

    def digest(self, microbatch: int) -> str:
        """A hash of the weights that a microbatch in flight runs on."""
        return digest_of(self._in_flight[microbatch].version.flat)

    @property
    def buffer_bytes(self) -> int:
        return _bytes(self.pool.newest.flat)

    @property
    def optimizer_bytes(self) -> int:
        return _bytes(self._gradient) + sum(map(_bytes, self._optimizer.state().values()))

    def _averaging_bytes_now(self) -> int:
        state = {**self._agreement.state(), **self._correction.state()}
        return sum(map(_bytes, [*state.values(), *self._sent.values()]))


def _compiled(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`method` compiled, apart from all other stages.

    torch.compile keeps its variants by code object, tries them one after another at every call, and
    gives up at eight of them; with a code object of its own, a stage has nothing to try but itself.
    """
    function = method.__func__  # type: ignore[attr-defined]
    own = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(MethodType(own, method.__self__))  # type: ignore[attr-defined]


def _aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tensors that a module holds more than once, each with its first name."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
    return aliases


def wire_dtype(setting: str, dtype: torch.dtype) -> torch.dtype | None:
    """What a tensor of `dtype` is converted to for the wire; None: sent as it is, never wider."""
    wire: torch.dtype = dtype if setting == "auto" else getattr(torch, setting)
    return wire if wire.itemsize < dtype.itemsize else None


def over_the_wire(tensor: Tensor, setting: str) -> tuple[Tensor, int]:
    """A tensor as the next stage gets it, and the bytes that it took."""
    wire = wire_dtype(setting, tensor.dtype)
    sent = tensor.to(wire) if wire is not None and tensor.is_floating_point() else tensor
    return sent.to(tensor.dtype), sent.nbytes


def wire_width(setting: str, width: int) -> int:
    """Bytes on the wire of a number that takes `width` at its sender: the same rule in bytes."""
    return width if setting == "auto" else min(width, getattr(torch, setting).itemsize)


def digest_of(flat: Tensor) -> str:
    """A hash of a buffer's bits."""
    return hashlib.blake2b(flat.cpu().view(torch.uint8).numpy().data, digest_size=8).hexdigest()


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
