"""Runs as a user of `simulate_modules` sees them: results, divergence, odd stages, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from asyncmesh import Config, simulate_modules
from asyncmesh.errors import ConfigError, DivergedError, StageError
from asyncmesh.observe.events import Event, EventHash, Loss, Memory
from asyncmesh.simulator.memory import predict
from asyncmesh.simulator.mesh import Sizes


def run(stages: Sequence[nn.Module], values: dict[str, dict[str, Any]]) -> Any:
    return simulate_modules(stages, tiny.squared_error, tiny.batch, Config.from_dict(values))


def test_the_mesh_is_as_long_as_the_stages_when_nothing_else_is_said() -> None:
    values = tiny.settings()
    del values["mesh"]
    assert run(tiny.stages(3), values).summary["mesh"] == {"stages": 3, "replicas": 2}


def test_a_mesh_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh.stages = 2: 3 stages were handed over; set"):
        run(tiny.stages(3), tiny.settings())


def test_a_run_that_diverges_keeps_what_it_has() -> None:
    def explode(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
        x, target = tiny.batch(replica, microbatch)
        return x, target * (float("inf") if microbatch == 7 else 1.0)

    config = Config.from_dict(tiny.settings())
    with pytest.raises(
        DivergedError, match=r"became inf before update 8.*learning_rate=0.001"
    ) as e:
        simulate_modules(tiny.stages(2), tiny.squared_error, explode, config)
    result = e.value.result
    assert result is not None
    assert result.summary["status"] == "diverged"
    assert result.summary["updates"] > 0
    assert sum(isinstance(event, Loss) for event in result.events) >= 8
    assert e.value.exit_code == 1


def test_integer_outputs_between_stages_carry_no_gradient() -> None:
    class Quantise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0).long().sum(-1)

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(tiny.WIDTH + 1, tiny.WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            embedded: Tensor = self.table(x)
            return embedded

    result = run([Quantise(), Look()], tiny.settings())
    assert result.summary["status"] == "completed"
    assert result.weights[0][0] == {}


def test_tied_parameters_and_frozen_ones() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(tiny.WIDTH, tiny.WIDTH, dtype=torch.float64)
            self.two = nn.Linear(tiny.WIDTH, tiny.WIDTH, dtype=torch.float64)
            self.two.weight = self.one.weight
            self.two.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(torch.tanh(self.one(x)))
            return y

    torch.manual_seed(0)
    module = Tied()
    values = tiny.settings(mesh={"stages": 1, "replicas": 1}, optimizer={"max_grad_norm": 0})
    weights = run([module], values).weights[0][0]
    o = values["optimizer"]
    twin = Tied()
    twin.load_state_dict(module.state_dict())
    torch.set_default_dtype(torch.float64)  # NAdam keeps its product of momenta in it
    try:
        optimizer = torch.optim.NAdam(
            [p for p in twin.parameters() if p.requires_grad],
            betas=(o["beta1"], o["beta2"]),
            momentum_decay=o["momentum_decay"],
            weight_decay=o["weight_decay"],
            decoupled_weight_decay=True,
        )
        from asyncmesh.algorithm.schedule import LearningRate

        rate = LearningRate(o["learning_rate"], "cosine", 12, 3, 0.1)
        for update in range(1, 13):
            optimizer.param_groups[0]["lr"] = rate(update)
            optimizer.zero_grad()
            x, target = tiny.batch(0, update - 1)
            tiny.squared_error(twin(x), target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(weights["one.weight"], twin.one.weight)
    assert torch.equal(weights["one.bias"], twin.one.bias)
    assert torch.equal(weights["two.bias"], module.two.bias)


def test_buffers_belong_to_a_worker_and_are_updated() -> None:
    stages = [nn.Sequential(nn.BatchNorm1d(tiny.WIDTH), nn.Linear(tiny.WIDTH, tiny.WIDTH)).double()]
    result = run(stages, tiny.settings(mesh={"stages": 1, "replicas": 2}))
    means = [row[0]["0.running_mean"] for row in result.weights]
    assert not torch.equal(means[0], means[1])
    norm = stages[0][0]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_mean.count_nonzero() == 0


def test_replicas_draw_their_own_dropout() -> None:
    def same(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return tiny.batch(0, microbatch)

    stages = [nn.Sequential(s, nn.Dropout(0.5)) for s in tiny.stages(2)]
    config = Config.from_dict(tiny.settings(train={"updates": 1}, optimizer={"warmup_updates": 0}))
    result = simulate_modules(stages, tiny.squared_error, same, config)
    one, other = (row[0]["0.0.weight"] for row in result.weights)
    assert not torch.equal(one, other)


def test_what_is_validated_is_the_mean_of_the_replicas_in_evaluation_mode() -> None:
    """By hand: batches of unequal size, dropout that must not act, and replicas that differ."""
    stages = [nn.Sequential(s, nn.Dropout(0.5)) for s in tiny.stages(2)]
    (x, target), (y, other) = tiny.batch(7, 0), tiny.batch(7, 1)
    validation = [(x, target), (y[:1], 3.0 * other[:1])]
    config = Config.from_dict(tiny.settings(train={"updates": 3}))
    result = simulate_modules(stages, tiny.squared_error, tiny.batch, config, validation=validation)

    def loss(rows: list[dict[str, Tensor]]) -> float:
        for stage, row in zip(stages, rows, strict=True):
            stage.eval().load_state_dict(row)
        with torch.no_grad():
            squares = [(stages[1](stages[0](i)) - t).square().flatten() for i, t in validation]
        return float(torch.cat(squares).mean())

    rows = result.weights
    means = [
        {name: (rows[0][s][name] + rows[1][s][name]) / 2 for name in rows[0][s]} for s in (0, 1)
    ]
    flat = [torch.cat([t.flatten() for stage in row for t in stage.values()]) for row in rows]
    mean = (flat[0] + flat[1]) / 2
    apart = ((flat[0] - mean).norm() ** 2 + (flat[1] - mean).norm() ** 2) / 2
    summary = result.summary
    assert summary["final_val_loss"] == pytest.approx(loss(means), rel=1e-12)
    assert summary["final_replica_val_losses"] == pytest.approx([loss(r) for r in rows], rel=1e-12)
    assert summary["consensus_distance"] == pytest.approx(float(apart.sqrt() / mean.norm()))
    assert summary["consensus_distance"] > 1e-3
    assert loss(means) != pytest.approx(loss(rows[0]), rel=1e-3)


def test_a_straggler_costs_no_validation() -> None:
    config = Config.from_dict(
        tiny.settings(
            train={"updates": 20, "eval_every": 2}, compute={"replica_slowdown": [1.0, 9.0]}
        )
    )
    validation = [tiny.batch(7, 0)]
    result = simulate_modules(
        tiny.stages(2), tiny.squared_error, tiny.batch, config, validation=validation
    )
    assert [point["update"] for point in result.summary["val_curve"]] == list(range(2, 21, 2))


def test_tokens_are_those_of_the_microbatches_there_were() -> None:
    def growing(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
        x, target = tiny.batch(replica, microbatch)
        rows = 1 + microbatch % 4
        return x[:rows], target[:rows]

    config = Config.from_dict(tiny.settings())
    summary = simulate_modules(tiny.stages(2), tiny.squared_error, growing, config).summary
    assert summary["tokens"] == 2 * 12 // 4 * (1 + 2 + 3 + 4) * tiny.WIDTH


def test_dropout_is_a_function_of_the_microbatch_and_not_of_the_order_of_events() -> None:
    def weights(**timing: Any) -> dict[str, Tensor]:
        torch.manual_seed(5)
        stages = [nn.Sequential(s, nn.Dropout(0.5)) for s in tiny.stages(2)]
        values = tiny.settings(compute=timing)
        final: dict[str, Tensor] = run(stages, values).weights[1][1]
        return final

    calm, stormy = weights(), weights(jitter=1.0, replica_slowdown=[3.0, 1.0])
    assert all(torch.equal(calm[name], stormy[name]) for name in calm)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (
            nn.Sequential(nn.Linear(6, 6).double(), nn.Linear(6, 6)),
            "need one dtype, not torch.float32, torch.float64; convert",
        ),
        (nn.LSTM(6, 6, dtype=torch.float64), "stage 0 returned tuple: a stage hands one tensor"),
    ],
)
def test_stages_that_cannot_be_trained(first: nn.Module, told: str) -> None:
    with pytest.raises(StageError, match=told):
        run([first, *tiny.stages(1)], tiny.settings())


@pytest.mark.parametrize("schedule", ["async", "1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("stages", "k", "h"), [(1, 1, 0), (4, 1, 0), (4, 2, 0), (4, 4, 2), (8, 1, 1)]
)
def test_live_versions_are_as_predicted(schedule: str, stages: int, k: int, h: int) -> None:
    values = tiny.settings(
        train={"updates": 24},
        mesh={"stages": stages, "replicas": 2},
        pipeline={
            "schedule": schedule,
            "accumulation": k,
            "extra_depth": h if schedule == "async" else 0,
        },
        averaging={"method": "async-momentum", "delay": 3, "fraction": 0.2},
    )
    config, modules = Config.from_dict(values), tiny.stages(stages)
    sizes = Sizes([0] * (stages - 1), [sum(p.numel() for p in m.parameters()) for m in modules])
    events: list[Event] = simulate_modules(modules, tiny.squared_error, tiny.batch, config).events
    predicted = predict(config, sizes, width=8)
    for memory in (event for event in events if isinstance(event, Memory)):
        expected = predicted[memory.stage]
        assert memory.buffers == expected.buffers <= expected.in_flight + 1
        assert memory.buffers * memory.buffer_bytes == expected.weight_bytes
        # Classes differ by one coordinate, which shows in stages as small as these.
        assert memory.averaging_bytes == pytest.approx(expected.averaging_bytes, rel=0.01, abs=24)
        if schedule != "async":
            assert memory.buffers == 2  # a flush leaves one version to read and one to write


def test_the_same_seed_gives_the_same_hash_and_another_seed_does_not() -> None:
    def digest(seed: int) -> str:
        values: dict[str, Any] = tiny.settings(
            compute={"jitter": 0.5},
            averaging={"method": "async-ema", "fraction": 0.25, "delay": "emergent"},
        )
        values["seed"] = seed
        hashed = EventHash()
        for event in run(tiny.stages(2), values).events:
            hashed(event)
        return hashed.hexdigest()

    assert len({digest(3) for _ in range(20)}) == 1
    assert digest(3) != digest(4)


class SharedFrozen(nn.Module):
    """A frozen tensor under two names, and a buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(tiny.WIDTH, tiny.WIDTH, dtype=torch.float64)
        self.two = nn.Linear(tiny.WIDTH, tiny.WIDTH, dtype=torch.float64)
        self.two.weight = self.one.weight
        self.one.weight.requires_grad_(False)
        mask = torch.linspace(0, 1, tiny.WIDTH, dtype=torch.float64)
        self.register_buffer("mask", mask)
        self.two.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.two.get_buffer("mask")
        y: Tensor = self.two(torch.tanh(self.one(x)) * mask) * self.get_buffer("mask")
        return y


def test_tensors_that_are_held_twice_and_not_trained() -> None:
    torch.manual_seed(0)
    module = SharedFrozen()
    result = run([module], tiny.settings(mesh={"stages": 1, "replicas": 1}))
    x, target = tiny.batch(0, 0)
    expected = tiny.squared_error(module(x), target).item()
    assert result.summary["train_curve"][0]["loss"] == pytest.approx(expected, rel=1e-12)
    twin = SharedFrozen()
    twin.load_state_dict(result.weights[0][0])
    assert torch.equal(twin.one.weight, module.one.weight)


def test_a_last_update_that_explodes_is_a_divergence() -> None:
    def steep(output: Tensor, target: Tensor) -> Tensor:
        return 1e300 * output.sum()

    optimizer = {"name": "sgd", "beta1": 0.0, "learning_rate": 1e12, "max_grad_norm": 0}
    optimizer |= {"warmup_updates": 0, "schedule": "constant"}
    config = Config.from_dict(tiny.settings(train={"updates": 1}, optimizer=optimizer))
    with pytest.raises(DivergedError, match="a weight is not finite after update 1"):
        simulate_modules(tiny.stages(2), steep, tiny.batch, config)


def test_a_loss_that_is_no_number_is_told() -> None:
    config = Config.from_dict(tiny.settings())
    with pytest.raises(StageError, match=r"the loss returned a tensor of shape \(4, 6\)"):
        simulate_modules(tiny.stages(2), lambda o, t: (o - t) ** 2, tiny.batch, config)


@pytest.mark.parametrize("method", ["sparta", "diloco", "async-overwrite", "async-ema"])
def test_a_coarse_wire_does_not_coarsen_weights_that_agree(method: str) -> None:
    """Replicas that see the same data agree, so averaging them must change nothing."""

    def same(replica: int, microbatch: int) -> tuple[Tensor, Tensor]:
        return tiny.batch(0, microbatch)

    def weights(wire: str) -> dict[str, Tensor]:
        averaging = {"method": method, "wire_dtype": wire, "interval": 1}
        averaging |= {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
        values = tiny.settings(train={"updates": 30}, averaging=averaging)
        if method.startswith("async"):
            averaging["delay"] = 0
        config = Config.from_dict(values)
        return simulate_modules(tiny.stages(2), tiny.squared_error, same, config).weights[0][0]

    full, coarse = weights("auto"), weights("bfloat16")
    for name in full:
        assert torch.allclose(full[name], coarse[name], rtol=0, atol=1e-9)


SHARED = nn.Linear(tiny.WIDTH, tiny.WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([SHARED, nn.Sequential(nn.Tanh(), SHARED)], r"stages\[1\].1.weight is stages\[0\].weight"),
        ([SHARED, torch.tanh], r"stages\[1\] is a builtin_function_or_method: a stage must be"),
        (SHARED, r"pass \[module\] for a single stage"),
        ([SHARED, nn.ReLU(inplace=True)], "stage 1 changes its input in place"),
    ],
    ids=["shared parameter", "no module", "one module", "in place"],
)
def test_stages_that_no_pipeline_can_be_made_of(stages: Any, told: str) -> None:
    with pytest.raises(StageError, match=told):
        run(stages, tiny.settings())


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (torch.zeros(2), r"batches\(0, 0\): must be a pair of tensors"),
        ((torch.zeros(2, 6), [0]), "must be a pair of tensors"),
        ((torch.zeros(2, 6).double(), torch.zeros(0)), "has no targets"),
    ],
)
def test_batches_that_are_none(batch: Any, told: str) -> None:
    config = Config.from_dict(tiny.settings())
    with pytest.raises(StageError, match=told):
        simulate_modules(tiny.stages(2), tiny.squared_error, lambda r, n: batch, config)


def test_a_loss_without_a_gradient_and_a_config_that_is_none_are_told() -> None:
    with pytest.raises(StageError, match="the loss has no gradient"):
        simulate_modules(
            tiny.stages(2),
            lambda output, target: (output.detach() - target).square().mean(),
            tiny.batch,
            Config.from_dict(tiny.settings()),
        )
    with pytest.raises(ConfigError, match=r"must be a Config; pass asyncmesh.Config.from_dict"):
        simulate_modules(tiny.stages(2), tiny.squared_error, tiny.batch, {"seed": 1})  # type: ignore[arg-type]
