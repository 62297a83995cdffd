"""Specifications: parsing, signing, and refusal of forged, changed, outdated and oversized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging.optim.modes import ModeParts
from averaging.reduction import lowrank
from averaging.reduction.lowrank import PowerSgd
from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity
from swarm.run.changes import restart_needed
from swarm.run.choices import RANK_MAX
from swarm.run.estimate import RunEstimate, bytes_per_hour, round_bytes
from swarm.run.signed import SPECIFICATION_BYTES_MAX, newest, run_id_of, sign, verified
from swarm.run.specification import RunSpecification
from swarm.run.task import TaskDescription, make_task

ROOT = Path(__file__).parents[2]
MINIMAL = 'name = "tiny"\ntarget_batch_size = 64\nbatch_size = 8\n[task]\nname = "bytelm"\n'


def specification(**changes: object) -> RunSpecification:
    table = {"name": "tiny", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}, **changes}
    return RunSpecification.from_table(table, "test")


@pytest.fixture
def owner() -> Identity:
    return Identity.generate()


@pytest.mark.parametrize(
    "path",
    [ROOT / "examples" / "bytelm.toml", ROOT / "swarm" / "cli" / "demo.toml"],
    ids=lambda path: path.name,
)
def test_shipped_files_are_valid(path: Path) -> None:
    assert RunSpecification.from_file(path).task.name == "bytelm"


def test_the_demo_trains_what_the_example_trains() -> None:
    example = RunSpecification.from_file(ROOT / "examples" / "bytelm.toml")
    demo = RunSpecification.from_file(ROOT / "swarm" / "cli" / "demo.toml")
    assert (demo.task, demo.batch_size) == (example.task, example.batch_size)


def test_the_example_is_a_run_that_a_home_line_carries() -> None:
    """At the pace of four volunteers of 550 samples/s, as the tutorial shows one."""
    example = RunSpecification.from_file(ROOT / "examples" / "bytelm.toml")
    description = make_task(example.task.name, example.task.settings).describe(example.batch_size)
    an_hour = bytes_per_hour(example, description, RunEstimate(peers=3, samples_per_s=3 * 550.0, epoch=0))
    assert an_hour is not None
    assert an_hour < 2.25e9, "5 Mbit/s each way"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target_batch_size = ", "not valid TOML"),
        (MINIMAL.replace("64", "0"), "run.toml: target_batch_size must be greater than or equal to 1, not 0"),
        (MINIMAL.replace("64", '"many"'), "run.toml: target_batch_size must be a whole number, not 'many'"),
        (MINIMAL.replace("64", "1.5"), "run.toml: target_batch_size must be a whole number, not 1.5"),
        (MINIMAL.replace('"tiny"', "3"), "run.toml: name must be a text, not 3"),
        ("optimizer = 3\n" + MINIMAL, "run.toml: optimizer must be a table, not 3"),
        ("banned = 3\n" + MINIMAL, "run.toml: banned must be a list, not 3"),
        (MINIMAL + '[optimizer]\nname = "lion"\n', "optimizer.name must match the pattern ^(adamw|adam|sgd"),
        (MINIMAL + '[optimizer]\nlearning_rate = "x"\n', "learning_rate must be a number, not 'x'"),
        ("error_feedback = 3\n" + MINIMAL, "run.toml: error_feedback must be true or false, not 3"),
        (MINIMAL.replace('"bytelm"', '""'), "run.toml: task.name must have 1 or more characters, not ''"),
        (MINIMAL.replace("batch_size = 8\n", ""), "run.toml: batch_size is missing"),
        (MINIMAL.replace('"tiny"', '"Tiny Run"'), "run.toml: name: 1 to 63 of a-z"),
        (MINIMAL + "colour = 3\n", "run.toml: task.colour is not a known key (misspelt?)"),
        (
            'codec = "zip"\n' + MINIMAL,
            "run.toml: codec must be one of 'float32', 'float16', 'bfloat16', 'int8', 'int4', 'int2', "
            "'sign', 'topk' or 'adaptive', not '",
        ),
        ('codec = "int2"\n' + MINIMAL, "run.toml: the file: codec int2 needs error_feedback = true"),
        (
            'mode = "hogwild"\n' + MINIMAL,
            "run.toml: mode.name must be one of 'gradients', 'local', 'diloco' or 'gossip', not 'hogwild'",
        ),
        (
            MINIMAL + '[mode]\nname = "local"\nmomentum = 0.9\n',
            "run.toml: mode: mode local has no setting momentum; it has: none",
        ),
        (
            MINIMAL + '[mode]\nname = "diloco"\nstreaming = 0\n',
            "run.toml: mode.streaming must be greater than or equal to 1, not 0",
        ),
        (
            'strategy = "sketch"\n' + MINIMAL,
            "run.toml: strategy.name must be one of 'powersgd', not 'sketch'",
        ),
        (
            MINIMAL + '[strategy]\nname = "powersgd"\nrank = 0\n',
            "run.toml: strategy.rank must be greater than or equal to 1, not 0",
        ),
        (MINIMAL + "[strategy]\nranks = 4\n", "run.toml: strategy.ranks is not a known key (misspelt?)"),
        (
            'codec = "int8"\nstrategy = "powersgd"\n' + MINIMAL,
            "run.toml: the file: the factors of strategy powersgd are small",
        ),
        (
            'strategy = "powersgd"\nmode = "gossip"\n' + MINIMAL,
            "run.toml: the file: mode gossip averages parameters themselves: strategy",
        ),
        (
            'strategy = "powersgd"\n' + MINIMAL + '[mode]\nname = "diloco"\ndelayed = true\n',
            "run.toml: the file: strategy powersgd needs whole matrices, and a mode with streaming",
        ),
        (
            'codec = "int8"\nmode = "gossip"\n' + MINIMAL,
            "run.toml: the file: mode gossip averages parameters themselves",
        ),
        (
            MINIMAL + '[optimizer]\n[optimizer.schedule]\nname = "cosine"\n',
            "run.toml: optimizer: schedule.total_epochs must be given",
        ),
        (
            MINIMAL + "[optimizer]\nlearning_rate = nan\n",
            "run.toml: optimizer.learning_rate must be a finite number",
        ),
    ],
)
def test_mistakes_are_reported_by_key_in_plain_words(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        RunSpecification.from_toml(text, "run.toml")
    assert message in str(error.value)
    assert "pydantic" not in str(error.value)
    assert "type=" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a = " + "[" * 20_000, "run.toml is not valid TOML: a value is too long or nests too deep"),
        ("a = " + "1" * 5000, "run.toml is not valid TOML: a value is too long or nests too deep"),
        (".a" * 20_000 + " = 1", "run.toml is not valid TOML: its values nest deeper than 16 levels"),
        (" = 0x" + "f" * 5000, "run.toml is not valid TOML: an integer has more than 64 bits"),
        (".seed = 99999999999999999999", "run.toml is not valid TOML: an integer has more than 64 bits"),
    ],
    ids=["nested", "digits", "dots", "hexadecimal", "seed"],
)
def test_a_value_that_no_specification_has_is_refused_in_one_sentence(line: str, message: str) -> None:
    text = MINIMAL + (line if line.startswith("a ") else "settings" + line)
    with pytest.raises(UsageError) as error:
        RunSpecification.from_toml(text, "run.toml")
    assert str(error.value) == message


@pytest.mark.parametrize("codec", ["int2", "sign", "topk", "int8"])
def test_error_feedback_is_part_of_the_specification(codec: str) -> None:
    found = RunSpecification.from_toml(f'codec = "{codec}"\nerror_feedback = true\n{MINIMAL}', "run.toml")
    assert found.error_feedback
    assert found.table()["error_feedback"] is True
    assert not RunSpecification.from_toml(MINIMAL, "run.toml").error_feedback


def test_a_mode_is_given_by_name_or_as_a_table(owner: Identity) -> None:
    from averaging.optim.optimizer import Diloco, Gradients

    assert specification().mode.build() == Gradients()
    assert specification(mode="diloco").mode.build() == Diloco()
    text = MINIMAL + '[mode]\nname = "diloco"\nouter_lr = 0.5\nstreaming = 4\n'
    written = RunSpecification.from_toml(text, "run.toml")
    assert written.mode.build() == Diloco(outer_lr=0.5, streaming=4)
    signed = sign(written, owner, version=1, created_s=0.0)
    assert verified(signed.blob).specification == written
    delayed = RunSpecification.from_toml(MINIMAL + '[mode]\nname = "diloco"\ndelayed = true\n', "run.toml")
    assert delayed.mode.build() == Diloco(delayed=True)
    for name in ("gradients", "local", "diloco", "gossip"):
        built = specification(mode=name).mode
        parts = ModeParts(inner=torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
        traits = built.build().build(parts).traits
        assert built.role == traits.role
        assert built.state_sync_epochs == (traits.state_sync_epochs if traits.canonical else None), (
            "as estimate.py computes it"
        )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("gradients", 1.5 * (2e6 + 12e6 / 10)),
        ("local", 1.5 * (2e6 + 4e6 / 100)),
        ({"name": "diloco", "streaming": 4}, 1.5 * (2e6 / 4 + 8e6 / 100)),
        ("gossip", 4e6),
    ],
)
def test_the_estimated_traffic_follows_the_mode(mode: object, expected: float) -> None:
    assert round_bytes(specification(mode=mode), described(parameters=1_000_000), 4) == pytest.approx(
        expected, rel=1e-3
    )


def described(**parts: Any) -> TaskDescription:
    return TaskDescription(**{"summary": "", "sample": "", "memory_bytes": 0, **parts})


def test_a_strategy_by_name_and_as_a_table(owner: Identity) -> None:
    assert specification().strategy is None
    assert specification().wire_format == "float16"
    named = RunSpecification.from_toml('strategy = "powersgd"\n' + MINIMAL, "run.toml")
    assert named.strategy is not None
    assert named.strategy.build() == PowerSgd()
    written = RunSpecification.from_toml(
        MINIMAL + '[strategy]\nname = "powersgd"\nrank = 8\nsaving_min = 1.5\n', "run.toml"
    )
    assert written.strategy is not None
    assert written.strategy.build() == PowerSgd(rank=8, saving_min=1.5)
    assert written.wire_format == "powersgd of rank 8 in float16"
    assert verified(sign(written, owner, version=1, created_s=0.0).blob).specification == written
    assert restart_needed(named, written), "members cannot change it while they train"
    assert RANK_MAX == lowrank.RANK_MAX
    assert specification(strategy="powersgd", mode="diloco", codec="adaptive").strategy is not None


def test_the_traffic_of_factors_is_estimated_from_shapes() -> None:
    """A matrix is sent as (1000 + 500) · 4 numbers, other tensors and the state as without a strategy."""
    shapes = ((1000, 500), (10, 5, 10), (300,))
    whole = described(parameters=500_000 + 500 + 300, shapes=shapes)
    state = 12 * whole.parameters / 10
    strategy = {"name": "powersgd", "rank": 4}
    assert round_bytes(specification(strategy=strategy), whole, 4) == int(
        1.5 * (2 * (1500 * 4 + 60 * 4 + 300) + state)
    )
    assert round_bytes(specification(strategy=strategy, codec="float32"), whole, 4) == int(
        1.5 * (4 * (1500 * 4 + 60 * 4 + 300) + state)
    )
    without_shapes = described(parameters=whole.parameters)
    assert round_bytes(specification(strategy=strategy), without_shapes, 4) == round_bytes(
        specification(), without_shapes, 4
    ), "at the most"


def test_every_mistake_has_a_line() -> None:
    with pytest.raises(UsageError) as error:
        RunSpecification.from_toml('name = "tiny"\nbatch_size = 0\n', "run.toml")
    assert [line.split()[1] for line in str(error.value).splitlines()] == [
        "target_batch_size",
        "batch_size",
        "task",
    ]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*absent\.toml: No such file"):
        RunSpecification.from_file(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        RunSpecification.from_file(tmp_path / "binary.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (1 << 19))
    with pytest.raises(UsageError, match="larger than"):
        RunSpecification.from_file(tmp_path / "large.toml")


def test_signing_and_reading_give_the_same_back(owner: Identity) -> None:
    written = RunSpecification.from_file(ROOT / "examples" / "bytelm.toml")
    signed = sign(written, owner, version=3, created_s=1.5e9)
    read = verified(signed.blob, signed.run_id)
    assert read == signed
    assert (read.specification, read.version, read.created_s, read.owner) == (
        written,
        3,
        1.5e9,
        owner.peer_id,
    )
    assert read.full_name == f"bytelm@{run_id_of(owner.peer_id, 'bytelm')}"


def test_the_same_specification_gives_the_same_bytes(owner: Identity) -> None:
    one = specification(task={"name": "t", "settings": {"a": 1, "b": {"y": 2.5, "x": [1, "z"]}}})
    other = specification(task={"settings": {"b": {"x": [1, "z"], "y": 2.5}, "a": 1}, "name": "t"})
    assert sign(one, owner, version=1, created_s=0).blob == sign(other, owner, version=1, created_s=0).blob


def test_run_ids_depend_on_owner_and_name(owner: Identity) -> None:
    other = Identity.generate().peer_id
    ids = {run_id_of(owner.peer_id, "a"), run_id_of(owner.peer_id, "b"), run_id_of(other, "a")}
    assert len(ids) == 3
    assert all(len(one) == 20 and one.isascii() and one == one.lower() for one in ids)


def test_a_forged_owner_is_refused(owner: Identity) -> None:
    """An attacker signs with its own key and claims the owner's: the signature does not fit."""
    attacker = Identity.generate()
    signed = sign(specification(), attacker, version=9, created_s=0)
    body, signature = msgpack.unpackb(signed.blob)
    table = {**msgpack.unpackb(body), "owner": owner.peer_id.to_bytes()}
    forged = msgpack.packb([msgpack.packb(table), signature])
    with pytest.raises(PeerError, match="signature is not its owner's"):
        verified(forged)


def test_a_specification_of_another_owner_is_refused(owner: Identity) -> None:
    mine = sign(specification(), owner, version=1, created_s=0)
    others = sign(specification(), Identity.generate(), version=2, created_s=0)
    with pytest.raises(PeerError, match=f"not to {mine.run_id}"):
        verified(others.blob, mine.run_id)


@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(place: int, flip: int) -> None:
    signed = _SIGNED
    blob = bytearray(signed.blob)
    blob[place % len(blob)] ^= flip
    with pytest.raises(PeerError):
        verified(bytes(blob), signed.run_id)


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else_happens(blob: bytes) -> None:
    with pytest.raises(PeerError):
        verified(blob)


def test_deep_nesting_is_refused_both_ways(owner: Identity) -> None:
    settings: dict[str, object] = {}
    for _ in range(50):
        settings = {"a": settings}
    with pytest.raises(UsageError, match="nests deeper"):
        sign(specification(task={"name": "t", "settings": settings}), owner, version=1, created_s=0)
    bomb = b"\x91" * 5000
    with pytest.raises(PeerError):
        verified(msgpack.packb([bomb, owner.sign(b"swarm run specification 1\0" + bomb)]))


def test_an_oversized_specification_is_refused_by_writer_and_reader(owner: Identity) -> None:
    large = specification(task={"name": "t", "settings": {"text": "x" * SPECIFICATION_BYTES_MAX}})
    with pytest.raises(UsageError, match="shorten"):
        sign(large, owner, version=1, created_s=0)
    with pytest.raises(PeerError, match="allowed"):
        verified(b"x" * (SPECIFICATION_BYTES_MAX + 1))


def test_the_highest_version_counts_whatever_the_order(owner: Identity) -> None:
    versions = [sign(specification(), owner, version=version, created_s=0) for version in (1, 3, 2)]
    assert newest(versions) == versions[1]
    assert newest(versions[::-1]) == versions[1]
    assert newest([]) is None


def test_two_specifications_of_one_version_are_decided_the_same_way_everywhere(owner: Identity) -> None:
    one = sign(specification(batch_size=1), owner, version=2, created_s=0)
    other = sign(specification(batch_size=2), owner, version=2, created_s=0)
    assert newest([one, other]) == newest([other, one])


@pytest.mark.parametrize("version", [0, -1, True, "2", 1 << 40])
def test_invalid_versions_are_refused(owner: Identity, version: object) -> None:
    blob = _signed_table(owner, {**_table(owner), "version": version})
    with pytest.raises(PeerError, match="version"):
        verified(blob)


def test_a_valid_signature_over_unknown_settings_is_reported_as_such(owner: Identity) -> None:
    with pytest.raises(PeerError, match="update swarm"):
        verified(_signed_table(owner, {**_table(owner), "format": "swarm.run/9"}))
    table = _table(owner)
    specification = table["specification"]
    assert isinstance(specification, dict)
    table["specification"] = {**specification, "novelty": 1}
    with pytest.raises(PeerError, match="novelty is not a known key"):
        verified(_signed_table(owner, table))


def _table(owner: Identity) -> dict[str, object]:
    body, _ = msgpack.unpackb(sign(specification(), owner, version=1, created_s=0).blob)
    table: dict[str, object] = msgpack.unpackb(body)
    return table


def _signed_table(owner: Identity, table: object) -> bytes:
    body = msgpack.packb(table)
    blob: bytes = msgpack.packb([body, owner.sign(b"swarm run specification 1\0" + body)])
    return blob


_SIGNED = sign(specification(), Identity.generate(), version=1, created_s=12.0)
