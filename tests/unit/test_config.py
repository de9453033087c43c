"""Settings: every rule, and that a mistake is one line with setting, value, rule and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncmesh.config import Config, setting_names
from asyncmesh.configuration import collect, flattened, nested, parse_assignment, resolved, to_toml
from asyncmesh.errors import ConfigError, InputFileError, UnknownSettingError

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"averaging": {"fraction": 1.5}}, "averaging.fraction = 1.5: must be less than or equal to 1"),
    ({"averaging": {"fraction": 0}}, "averaging.fraction = 0: must be greater than 0"),
    ({"averaging": {"fraction": 0.2, "delay": 10}}, "a coordinate may be in one round at a time"),
    ({"averaging": {"delay": 50}}, "try averaging.interval=3 or averaging.fraction=0.02"),
    ({"averaging": {"method": "sparta", "delay": 3}}, "sparta waits for every round"),
    ({"averaging": {"max_in_flight": 21}}, "try averaging.max_in_flight=20"),
    ({"averaging": {"delay": "soon"}}, 'averaging.delay = "soon"'),
    ({"mesh": {"stages": 0}}, "mesh.stages = 0: must be greater than or equal to 1"),
    ({"mesh": {"stages": "two"}}, 'mesh.stages = "two"'),
    ({"mesh": 3}, "mesh = 3: must be a table of settings"),
    ({"optimizer": {"name": "adam"}}, 'must be "nadamw", "adamw", "muon" or "sgd"'),
    ({"optimizer": {"warmup_updates": 301}}, "try optimizer.warmup_updates=30"),
    ({"pipeline": {"extra_depth": [1, 2]}}, "one entry for each of the 1 edges"),
    ({"links": {"latency_ms": [1.0, 2.0]}}, "links.latency_ms = [1.0, 2.0]"),
    ({"model": {"heads": 3}}, "model.heads = 3: must divide model.width = 128"),
    ({"compute": {"replica_slowdown": [1.0]}}, "needs one factor for each of mesh.replicas = 2"),
    ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate = nan"),
    ({"optimizer": {"learning_rate": 1e300}}, "must be less than or equal to 1000000000000"),
    ({"averaging": {"fraction": 5e-324}}, "must be at least 1e-06: a cycle takes 1/fraction"),
    ({"averaging": {"delay": "soon"}}, 'must be a valid integer or "emergent"'),
    ({"averaging": {"max_in_flight": 2}}, "or a larger averaging.max_in_flight (now 2)"),
    ({"averaging": {"method": "allreduce", "fraction": 0.1}}, "averages whole gradients"),
    ({"averaging": {"method": "allreduce", "interval": 2}}, "averages whole gradients"),
    ({"links": {"bandwidth_mbps": [-1]}}, "links.bandwidth_mbps = -1: must be greater than 0"),
    ({"links": {"bandwidth_mbps": "x"}}, 'links.bandwidth_mbps = "x": must be a valid number;'),
    ({"links": {"replica_slowdown": [1.0]}}, "needs one factor for each of mesh.replicas = 2"),
    ({"pipeline": {"schedule": "1f1b", "extra_depth": [1]}}, "flushes at every update"),
    ({"pipeline": {"schedule": "gpipe", "order": "eager"}}, "gpipe has an order of its own"),
    ([1], "config = [1]: must be a dict of settings"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("values", "told"), MISTAKES)
def test_a_mistake_is_one_line_that_names_value_rule_and_fix(
    values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(values)
    message = str(caught.value)
    assert told in message
    assert "\n" not in message
    setting, _, rest = message.partition(" = ")
    assert setting == caught.value.setting
    rule, semicolon, fix = rest.rpartition("; ")
    assert rule
    assert semicolon
    assert fix
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("averaging.fracton", "averaging.fraction"),
        ("mesh.stage", "mesh.stages"),
        ("stages", "mesh.stages"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownSettingError, match=nearest):
        collect(None, None, [f"--{name}=1"])
    with pytest.raises(UnknownSettingError, match=nearest):
        Config.from_dict(nested({name: 1}))


def test_layers_go_over_each_other_and_say_where_a_value_is_from(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 4\n[mesh]\nstages = 3\nreplicas = 5\n")
    layers = collect("default", file, ["--mesh.replicas=7", "--averaging.delay=emergent"])
    config = layers.config()
    assert (config.seed, config.mesh.stages, config.mesh.replicas) == (4, 3, 7)
    assert config.averaging_delay is None
    assert layers.origin["mesh.replicas"] == "command line"
    assert layers.origin["mesh.stages"] == str(file)
    assert layers.origin["model.width"] == "preset default"
    assert "model.heads" in layers.origin


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--train.updates=5", 5),
        ("--optimizer.learning_rate=1e-3", 1e-3),
        ("--averaging.method=async-ema", "async-ema"),
        ("--pipeline.extra_depth=[1, 2]", [1, 2]),
        ("--train.compile=true", True),
        ('--data.source="a b.txt"', "a b.txt"),
        ("--data.source=/some/where.txt", "/some/where.txt"),
    ],
)
def test_values_on_the_command_line_are_toml_or_text(argument: str, value: object) -> None:
    assert parse_assignment(argument)[1] == value


def test_a_setting_without_a_value() -> None:
    with pytest.raises(ConfigError, match=r"write --train.updates=VALUE"):
        parse_assignment("--train.updates")


@pytest.mark.parametrize("text", ["[mesh\nstages = 2", "= 3"])
def test_a_broken_file_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(InputFileError, match=r"is not valid TOML: .*; mend that line"):
        collect(None, file, [])
    with pytest.raises(InputFileError, match="there is no such file"):
        collect(None, tmp_path / "absent.toml", [])


def test_the_resolved_file_gives_the_same_run_again() -> None:
    for method in ("async-momentum", "diloco", "allreduce", "none", "sparta"):
        config = Config.from_dict({"averaging": {"method": method}, "mesh": {"stages": 3}})
        import tomllib

        again = Config.from_dict(tomllib.loads(to_toml(config)))
        assert resolved(again) == resolved(config)


def test_a_resolved_file_does_not_bind_who_changes_it(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text(to_toml(Config.from_dict({"mesh": {"replicas": 1}})))
    changed = collect(None, file, ["--mesh.replicas=2"]).config()
    assert changed.rounds_in_flight == 10


def test_a_method_drops_what_a_layer_below_meant_for_another(tmp_path: Path) -> None:
    file = tmp_path / "deep.toml"
    file.write_text('[pipeline]\nextra_depth = 2\norder = "eager"\n[averaging]\nfraction = 0.1\n')
    flushed = collect(None, file, ["--pipeline.schedule=1f1b"])
    assert flushed.config().pipeline.extra_depth == 0
    assert "pipeline.order" not in flushed.origin
    assert collect(None, file, ["--averaging.method=allreduce"]).config().averaging_fraction == 1
    with pytest.raises(ConfigError, match="flushes at every update"):
        collect(None, file, ["--pipeline.extra_depth=1", "--pipeline.schedule=1f1b"]).config()
    for order in (1, -1):  # one layer is one layer, whatever the order in it
        given = ["--averaging.delay=5", "--averaging.method=sparta"][::order]
        with pytest.raises(ConfigError, match="sparta waits for every round"):
            collect(None, None, given).config()


def test_an_empty_table_that_is_none_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("[mesh]\n[foo]\n")
    with pytest.raises(UnknownSettingError, match="foo: there is no such setting"):
        collect(None, file, [])


def test_flattened_and_nested_are_inverse() -> None:
    tables = {"seed": 1, "mesh": {"stages": 2, "replicas": 3}}
    assert nested(flattened(tables)) == tables


def test_defaults_of_the_chosen_method_and_optimiser() -> None:
    diloco = Config.from_dict({"averaging": {"method": "diloco"}})
    assert (diloco.averaging_fraction, diloco.averaging_interval, diloco.averaging_delay) == (
        1,
        30,
        0,
    )
    assert Config.from_dict({"optimizer": {"name": "sgd"}}).beta1 == 0
    assert Config.from_dict({"optimizer": {"name": "sgd", "beta1": 0.9}}).beta1 == 0.9
    assert Config.from_dict({"averaging": {"fraction": 0.07}}).classes == 15
    assert Config.from_dict({"averaging": {"fraction": 1 / 49, "delay": 0}}).classes == 49


def test_every_key_of_the_contract_exists() -> None:
    contract = """seed output_dir train.updates train.eval_every train.device train.dtype
    train.compile mesh.stages mesh.replicas pipeline.schedule pipeline.microbatch_size
    pipeline.accumulation pipeline.extra_depth pipeline.order pipeline.wire_dtype averaging.method
    averaging.fraction averaging.interval averaging.delay averaging.strength averaging.ema_start
    averaging.ema_end averaging.ema_warmup averaging.outer_learning_rate averaging.outer_momentum
    averaging.wire_dtype optimizer.name optimizer.learning_rate optimizer.beta1 optimizer.beta2
    optimizer.momentum_decay optimizer.weight_decay optimizer.max_grad_norm
    optimizer.warmup_updates optimizer.schedule optimizer.min_lr_ratio model.name model.layers
    model.width model.heads model.context model.vocab data.source data.validation
    links.bandwidth_mbps links.latency_ms"""
    assert set(contract.split()) <= set(setting_names())
