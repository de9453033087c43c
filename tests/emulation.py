"""Slow float64 emulation of the training algorithm, to be used as an oracle in tests.

The file is written from the equations alone and shares no code with the package on purpose: an
error in the package cannot repeat itself here. It favours literalness over speed: every version
of every weight vector is kept, and nothing happens concurrently.

The algorithm depends on version numbers only and never on time, so the emulation walks through
the microbatches in order. Microbatch n is forwarded through all stages and then backwarded
through all stages; whenever k microbatches are complete, every stage of every replica is updated.

Notation: P stages, M replicas, U updates per worker, k microbatches per update, h extra depth.
A worker is a pair (stage, replica). Version j of a worker is its flat weight vector after j
updates, including the merges at the boundary of update j; version 0 is the initial weights.
The weight vector has the parameters in named_parameters order, each flattened row-major.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Settings = Mapping[str, Mapping[str, Any]]
Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Callable[[int, int], tuple[Tensor, Tensor]]
Subset = Callable[[int, int], Tensor]

SCHEDULES = ("async", "1f1b", "gpipe")
OPTIMIZERS = ("nadamw", "adamw", "sgd")
OVERWRITES = ("sparta", "local-sgd", "async-overwrite")
OUTER_MOMENTUM = ("diloco", "async-momentum")
METHODS = ("none", "allreduce", *OVERWRITES, "async-delta", "async-ema", *OUTER_MOMENTUM)


@dataclass
class Worker:
    """One stage of one replica: all its versions, its open gradients and its states.

    versions[j] = weights after j updates; gradients = those of the microbatches of the open update;
    m, v = first and second moment of the optimizer; e = correction, r = outer weights and
    b = outer momentum of the averaging.
    """

    versions: list[Tensor]
    m: Tensor
    v: Tensor
    e: Tensor
    r: Tensor
    b: Tensor
    gradients: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """One averaging round of one stage: S, the snapshots y_r = w_r[S], and a = mean_r y_r.

    The round is merged by every replica right after update `due` = (update of snapshot) + D.
    """

    due: int
    indices: Tensor
    snapshots: list[Tensor]
    mean: Tensor


# ------------------------------------------------------------------------------------ pipeline


def capacity(stage: int, stages: int, extra_depth: int | Sequence[int]) -> int:
    """Capacity of a stage: c_s = 1 + sum over edges e = s..P-2 of (1 + h_e)."""
    total = 1
    for edge in range(stage, stages - 1):
        depth = extra_depth if isinstance(extra_depth, int) else extra_depth[edge]
        total = total + 1 + depth
    return total


def forward_version(
    n: int, stage: int, stages: int, accumulation: int, extra_depth: int | Sequence[int]
) -> int:
    """Version that forwards microbatch n in "async": max(0, floor((n - (c_s - 1)) / k))."""
    c = capacity(stage, stages, extra_depth)
    return max(0, (n - (c - 1)) // accumulation)


def version_used(n: int, stage: int, stages: int, pipeline: Mapping[str, Any]) -> int:
    """Version of microbatch n: forward_version for "async", floor(n/k) for "1f1b" and "gpipe"."""
    k = int(pipeline.get("accumulation", 1))
    if pipeline.get("schedule", "async") == "async":
        return forward_version(n, stage, stages, k, pipeline.get("extra_depth", 0))
    return n // k


def flatten(stage: nn.Module) -> Tensor:
    """Flat weight vector of a module: w = concat(flat(p) for p in named_parameters order)."""
    parts = [parameter.detach().reshape(-1) for _, parameter in stage.named_parameters()]
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat(parts).clone()


def unflatten(stage: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """Inverse of flatten: the named tensors p with concat(flat(p)) = w."""
    named: dict[str, Tensor] = {}
    start = 0
    for name, parameter in stage.named_parameters():
        named[name] = flat[start : start + parameter.numel()].reshape(parameter.shape)
        start = start + parameter.numel()
    return named


def microbatch_gradients(
    stages: Sequence[nn.Module], weights: Sequence[Tensor], loss: Loss, x: Tensor, target: Tensor
) -> list[Tensor]:
    """Gradients of one microbatch for every stage, stage s having the flat weights w_s.

    Forward:  x_{s+1} = f_s(w_s, x_s) for s = 0..P-1, and l = loss(x_P, target).
    Backward: G_P = dl/dx_P; for s = P-1..0: g_s = (df_s/dw_s)^T G_{s+1} and
              G_s = (df_s/dx_s)^T G_{s+1}, at the very same w_s and x_s as in the forward.
    """
    inputs: list[Tensor] = []
    flats: list[Tensor] = []
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    with torch.enable_grad():
        for s, stage in enumerate(stages):
            # The input of stage 0 is data (possibly integers), which needs no gradient.
            stage_input = x.detach().clone().requires_grad_(s > 0)
            flat = weights[s].detach().clone().requires_grad_(True)
            x = torch.func.functional_call(stage, unflatten(stage, flat), (stage_input,))
            inputs.append(stage_input)
            flats.append(flat)
            outputs.append(x)
            gradients.append(torch.zeros_like(weights[s]))
        prediction = x.detach().clone().requires_grad_(True)
        (upstream,) = torch.autograd.grad(loss(prediction, target), prediction)

    for s in reversed(range(len(stages))):
        if not outputs[s].requires_grad:
            break  # stage 0 has no parameters: there is nothing left to differentiate
        wanted = [flats[s]] if s == 0 else [flats[s], inputs[s]]
        found = torch.autograd.grad(
            outputs[s], wanted, grad_outputs=upstream, allow_unused=True, materialize_grads=True
        )
        gradients[s] = found[0]
        if s > 0:
            upstream = found[1]
    return gradients


# ----------------------------------------------------------------------------------- optimizer


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Arithmetic mean: (t_1 + ... + t_n) / n."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total = total + tensor
    return total / len(tensors)


def clip(g: Tensor, max_grad_norm: float) -> Tensor:
    """Clipping: g * min(1, max_grad_norm / (||g|| + 1e-6)); max_grad_norm = 0 means none."""
    if max_grad_norm == 0:
        return g
    norm = math.sqrt(float((g * g).sum()))
    return g * min(1.0, max_grad_norm / (norm + 1e-6))


def learning_rate(u: int, updates: int, optimizer: Mapping[str, Any]) -> float:
    """Learning rate of update u = 1, 2, ..., with W = warmup_updates and r = min_lr_ratio.

    eta_u = eta u / W for u <= W; afterwards eta_u = eta ("constant"), or ("cosine")
    eta_u = eta (r + (1 - r) (1 + cos(pi t)) / 2) with t = (u - W) / (U - W).
    """
    eta = float(optimizer["learning_rate"])
    warmup = int(optimizer.get("warmup_updates", 0))
    if u <= warmup:
        return eta * u / warmup
    if optimizer.get("schedule", "constant") == "constant":
        return eta
    ratio = float(optimizer.get("min_lr_ratio", 0.1))
    t = (u - warmup) / (updates - warmup)
    return eta * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * t)))


def nadam_momentum(u: int, beta1: float, psi: float) -> float:
    """Momentum of NAdam at update u: mu_u = beta1 (1 - 0.96^(u psi) / 2)."""
    return beta1 * (1 - 0.5 * math.pow(0.96, u * psi))


def nadamw_step(
    worker: Worker, w: Tensor, g: Tensor, u: int, eta: float, optimizer: Mapping[str, Any]
) -> Tensor:
    """NAdamW with decoupled weight decay; returns the new weights and sets m and v.

    w <- w (1 - eta wd); m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2;
    w <- w - eta [(1 - mu_u) g / (1 - prod_{i<=u} mu_i) + mu_{u+1} m / (1 - prod_{i<=u+1} mu_i)]
                 / (sqrt(v / (1 - beta2^u)) + epsilon).
    """
    beta1, beta2 = float(optimizer["beta1"]), float(optimizer["beta2"])
    psi = float(optimizer["momentum_decay"])
    epsilon = float(optimizer.get("epsilon", 1e-8))
    mu_now = nadam_momentum(u, beta1, psi)
    mu_next = nadam_momentum(u + 1, beta1, psi)
    product_now = math.prod(nadam_momentum(i, beta1, psi) for i in range(1, u + 1))
    product_next = product_now * mu_next

    w = w * (1 - eta * float(optimizer["weight_decay"]))
    worker.m = beta1 * worker.m + (1 - beta1) * g
    worker.v = beta2 * worker.v + (1 - beta2) * g * g
    direction = (1 - mu_now) * g / (1 - product_now) + mu_next * worker.m / (1 - product_next)
    return w - eta * direction / (torch.sqrt(worker.v / (1 - beta2**u)) + epsilon)


def adamw_step(
    worker: Worker, w: Tensor, g: Tensor, u: int, eta: float, optimizer: Mapping[str, Any]
) -> Tensor:
    """AdamW with decoupled weight decay; returns the new weights and sets m and v.

    w <- w (1 - eta wd); m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2;
    w <- w - eta (m / (1 - beta1^u)) / (sqrt(v / (1 - beta2^u)) + epsilon).
    """
    beta1, beta2 = float(optimizer["beta1"]), float(optimizer["beta2"])
    epsilon = float(optimizer.get("epsilon", 1e-8))
    w = w * (1 - eta * float(optimizer["weight_decay"]))
    worker.m = beta1 * worker.m + (1 - beta1) * g
    worker.v = beta2 * worker.v + (1 - beta2) * g * g
    direction = worker.m / (1 - beta1**u)
    return w - eta * direction / (torch.sqrt(worker.v / (1 - beta2**u)) + epsilon)


def sgd_step(
    worker: Worker, w: Tensor, g: Tensor, u: int, eta: float, optimizer: Mapping[str, Any]
) -> Tensor:
    """SGD with momentum beta1 and coupled weight decay; returns the new weights and sets m.

    d = g + wd w; m <- d at the first update, else m <- beta1 m + d; w <- w - eta m.
    """
    d = g + float(optimizer["weight_decay"]) * w
    worker.m = d if u == 1 else float(optimizer["beta1"]) * worker.m + d
    return w - eta * worker.m


def optimizer_step(
    worker: Worker, g: Tensor, u: int, updates: int, optimizer: Mapping[str, Any]
) -> Tensor:
    """Weights after update u, before the merges: step(w, clip(g), eta_u), w = version u - 1."""
    w = worker.versions[u - 1]
    g = clip(g, float(optimizer.get("max_grad_norm", 1.0)))
    eta = learning_rate(u, updates, optimizer)
    if optimizer["name"] == "nadamw":
        return nadamw_step(worker, w, g, u, eta, optimizer)
    if optimizer["name"] == "adamw":
        return adamw_step(worker, w, g, u, eta, optimizer)
    return sgd_step(worker, w, g, u, eta, optimizer)


# ----------------------------------------------------------------------------------- averaging


def ema_beta(u: int, updates: int, averaging: Mapping[str, Any]) -> float:
    """Decay of the correction's moving average at a merge after update u.

    beta(u) = start for u <= warmup U; then with t = (u - warmup U) / (U - warmup U)
    beta(u) = start + (end - start) (1 - cos(pi t)) / 2.
    """
    start = float(averaging.get("ema_start", 0.5))
    end = float(averaging.get("ema_end", 0.99))
    warmup = float(averaging.get("ema_warmup", 1 / 30)) * updates
    if u <= warmup:
        return start
    t = (u - warmup) / (updates - warmup)
    return start + (end - start) * 0.5 * (1 - math.cos(math.pi * t))


def ema_correction(
    worker: Worker, indices: Tensor, d: Tensor, u: int, updates: int, averaging: Mapping[str, Any]
) -> Tensor:
    """Updates and returns e[S]: e[S] <- beta e[S] + (1 - beta) d with beta = beta(u)."""
    beta = ema_beta(u, updates, averaging)
    worker.e[indices] = beta * worker.e[indices] + (1 - beta) * d
    return worker.e[indices]


def outer_step(worker: Worker, indices: Tensor, a: Tensor, averaging: Mapping[str, Any]) -> Tensor:
    """Outer Nesterov step on the round's mean; sets r and b, and returns r[S].

    Delta = a - r[S]; b[S] <- mu b[S] + Delta; r[S] <- r[S] + eta_o (Delta + mu b[S]), new b.
    """
    mu = float(averaging["outer_momentum"])
    eta_outer = float(averaging["outer_learning_rate"])
    delta = a - worker.r[indices]
    worker.b[indices] = mu * worker.b[indices] + delta
    worker.r[indices] = worker.r[indices] + eta_outer * (delta + mu * worker.b[indices])
    return worker.r[indices]


def merge(
    worker: Worker,
    w: Tensor,
    y: Tensor,
    due_round: Round,
    u: int,
    updates: int,
    averaging: Mapping[str, Any],
) -> Tensor:
    """Weights of one replica, whose snapshot was y, after merging a round after update u.

    With d = w[S] - y:
    sparta, local-sgd, async-overwrite: w[S] <- a.
    async-delta:    w[S] <- a + lambda d.
    async-ema:      w[S] <- a + lambda e[S], after e[S] <- beta(u) e[S] + (1 - beta(u)) d.
    diloco:         w[S] <- r[S], after the outer step.
    async-momentum: w[S] <- r[S] + lambda e[S], after the outer step, with e[S] as in async-ema
                    (correction "ema"), or with d in place of e[S] (correction "delta").
    """
    method = averaging["method"]
    strength = float(averaging.get("strength", 1.0))
    indices, a = due_round.indices, due_round.mean
    d = w[indices] - y

    if method in OVERWRITES:
        value = a
    elif method == "async-delta":
        value = a + strength * d
    elif method == "async-ema":
        value = a + strength * ema_correction(worker, indices, d, u, updates, averaging)
    elif method == "diloco":
        value = outer_step(worker, indices, a, averaging)
    elif averaging.get("correction", "ema") == "ema":
        e = ema_correction(worker, indices, d, u, updates, averaging)
        value = outer_step(worker, indices, a, averaging) + strength * e
    else:
        value = outer_step(worker, indices, a, averaging) + strength * d

    merged = w.clone()
    merged[indices] = value
    return merged


# ----------------------------------------------------------------------------------- emulation


def check(stages: Sequence[nn.Module], settings: Settings) -> None:
    """Rejects what the equations do not define: unknown names, P != len(stages), not float64."""
    pipeline, averaging = settings.get("pipeline", {}), settings.get("averaging", {})
    optimizer = settings["optimizer"]
    if settings["mesh"]["stages"] != len(stages):
        raise ValueError("mesh.stages is not the number of stages")
    depth = pipeline.get("extra_depth", 0)
    if not isinstance(depth, int) and len(depth) != len(stages) - 1:
        raise ValueError("pipeline.extra_depth does not have one entry per edge")
    for value, known in (
        (pipeline.get("schedule", "async"), SCHEDULES),
        (optimizer["name"], OPTIMIZERS),
        (optimizer.get("schedule", "constant"), ("constant", "cosine")),
        (averaging.get("method", "none"), METHODS),
        (averaging.get("correction", "ema"), ("ema", "delta")),
    ):
        if value not in known:
            raise ValueError(f"{value!r} is not one of {known}")
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.dtype != torch.float64:
                raise ValueError(f"parameter {name} is {parameter.dtype}, not torch.float64")


def update_stage(
    stage: int,
    workers: Sequence[Worker],
    rounds: list[Round],
    u: int,
    settings: Settings,
    subset: Subset | None,
) -> None:
    """Update u (1-based) of one stage on all its replicas, with the merges at its boundary.

    g_r = mean of the gradients of the k microbatches, and for allreduce g_r <- mean_r g_r;
    w_r <- step(w_r, clip(g_r)); then the rounds with due = u are merged, oldest first; then, if
    I divides u, the next round starts with y_r = w_r[S] and a = mean_r y_r, merged at once if
    D = 0. The result is version u. `rounds` has all rounds of the stage in the order they began.
    """
    updates = int(settings["train"]["updates"])
    averaging = settings.get("averaging", {})
    method = averaging.get("method", "none")
    delay = int(averaging.get("delay", 0))

    gradients = [mean(worker.gradients) for worker in workers]
    if method == "allreduce":
        gradients = [mean(gradients) for _ in workers]
    current: list[Tensor] = []
    for worker, g in zip(workers, gradients, strict=True):
        current.append(optimizer_step(worker, g, u, updates, settings["optimizer"]))

    def merge_everywhere(due_round: Round) -> None:
        """Merges a round on every replica: w_r <- merge(w_r, y_r)."""
        for i, worker in enumerate(workers):
            y = due_round.snapshots[i]
            current[i] = merge(worker, current[i], y, due_round, u, updates, averaging)

    if method not in ("none", "allreduce"):
        for old in rounds:
            if old.due == u:
                merge_everywhere(old)
        if u % int(averaging.get("interval", 1)) == 0:
            if subset is None:
                indices = torch.arange(len(current[0]))
            else:
                indices = subset(stage, len(rounds))
            snapshots = [w[indices].clone() for w in current]
            new = Round(u + delay, indices, snapshots, mean(snapshots))
            rounds.append(new)
            if delay == 0:
                merge_everywhere(new)

    for worker, w in zip(workers, current, strict=True):
        worker.versions.append(w)
        worker.gradients = []


def emulate(
    stages: Sequence[nn.Module],
    loss: Loss,
    batches: Batches,
    settings: Settings,
    subset: Subset | None = None,
) -> list[list[dict[str, Tensor]]]:
    """Trains and returns result[replica][stage] = {parameter name: final tensor}, version U.

    For n = 0..U k - 1: every replica runs microbatch n, stage s with the weights of the version
    that the schedule prescribes, and its gradients go into update floor(n/k) (0-based); when
    (n + 1) mod k = 0 that update is complete and is made on all stages of all replicas.

    Stages are functions of their parameters and their input alone (no randomness, no buffers that
    change), and every parameter is trained; one that does not reach the loss has gradient 0.
    `subset(stage, round)` gives distinct indices; without it a round covers all coordinates.
    """
    check(stages, settings)
    stages = [copy.deepcopy(stage) for stage in stages]
    pipeline = settings.get("pipeline", {})
    replicas = int(settings["mesh"]["replicas"])
    updates = int(settings["train"]["updates"])
    k = int(pipeline.get("accumulation", 1))

    workers: list[list[Worker]] = []  # workers[stage][replica]
    rounds: list[list[Round]] = []  # rounds[stage], in the order in which they began
    for stage in stages:
        rounds.append([])
        workers.append([])
        for _ in range(replicas):
            w = flatten(stage)
            m, v, e, b = (torch.zeros_like(w) for _ in range(4))
            workers[-1].append(Worker(versions=[w], m=m, v=v, e=e, r=w.clone(), b=b))

    for n in range(updates * k):
        for replica in range(replicas):
            weights: list[Tensor] = []
            for s in range(len(stages)):
                version = version_used(n, s, len(stages), pipeline)
                weights.append(workers[s][replica].versions[version])
            x, target = batches(replica, n)
            gradients = microbatch_gradients(stages, weights, loss, x, target)
            for s in range(len(stages)):
                workers[s][replica].gradients.append(gradients[s])
        if (n + 1) % k == 0:
            for s in range(len(stages)):
                update_stage(s, workers[s], rounds[s], n // k + 1, settings, subset)

    result: list[list[dict[str, Tensor]]] = []
    for replica in range(replicas):
        result.append([])
        for s, stage in enumerate(stages):
            final = unflatten(stage, workers[s][replica].versions[updates])
            result[replica].append({name: value.clone() for name, value in final.items()})
    return result
