"""A grid's specification is signed like that of a run, and servers enter the grid without copying options."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moe.protocol.names import ExpertGrid, ExpertUid
from swarm.cli.serve import serve
from swarm.cli.serve_choices import ServeChoices
from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity
from swarm.run import grid_experts
from swarm.run.changes import Change, restart_needed, sign_change
from swarm.run.entering import found_run
from swarm.run.grid import GridSpecification
from swarm.run.grid_entry import check_agrees, check_module, create_or_enter, module_hash
from swarm.run.grid_experts import ExpertFactory, ExpertMemory
from swarm.run.signed import SignedSpecification, sign, verified
from swarm.run.specification import RunSpecification
from tests.run.fake_dht import FakeDht, FixedClock

ROOT = Path(__file__).parents[2]


def grid(**changes: object) -> GridSpecification:
    return GridSpecification.from_table({"experts": "ffn.[0:2].[0:4]", "members": "open", **changes}, "test")


def signed(owner: Identity, **changes: object) -> SignedSpecification:
    return sign(grid(**changes), owner, version=1, created_s=0.0)


def test_the_shipped_example_is_valid() -> None:
    assert GridSpecification.from_file(ROOT / "examples" / "grid.toml").name == "grid.ffn"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": "ffn"}, "test: experts: 'ffn' has no dimensions"),
        ({"experts": []}, "test: experts"),
        ({"experts": 3}, "test: experts"),
        ({"name": "ffn"}, "test: name: the name of a grid begins with 'grid.'"),
        ({"dtype": "int8"}, "test: dtype must be one of"),
        ({"module": "short"}, "test: module"),
        ({"optimizer": {"learning_rate": -1}}, "test: optimizer.learning_rate must be greater than or equal"),
        ({"optimizer": {"warmup_steps": 5, "training_steps": 5}}, "they must exceed warmup_steps"),
        ({"hiden_dim": 5}, "test: hiden_dim is not a known key (misspelt?)"),
    ],
    ids=[
        "no-dimensions",
        "no-patterns",
        "no-text",
        "name-of-a-run",
        "dtype",
        "module",
        "rate",
        "schedule",
        "misspelt",
    ],
)
def test_a_wrong_file_is_refused_with_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        grid(**changes)
    assert message in str(caught.value)


def test_a_run_cannot_take_the_name_of_a_grid() -> None:
    with pytest.raises(UsageError, match=r"begin with 'grid\.' are reserved for grids"):
        RunSpecification.from_table(
            {"name": "grid.x", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}, "test"
        )


def test_a_grid_survives_signing_and_is_no_run() -> None:
    owner = Identity.generate()
    one = signed(owner, hidden_dim=32)
    again = verified(one.blob, one.run_id)
    assert again.grid == grid(hidden_dim=32)
    assert again.grid.patterns == [ExpertGrid.parse("ffn.[0:2].[0:4]")]
    with pytest.raises(UsageError, match="is a grid of experts, not a run that trains"):
        _ = again.training
    with pytest.raises(PeerError, match="its signature is not its owner's"):
        verified(one.blob.replace(b"hidden_dim", b"hidden_dip"), one.run_id)


def test_a_server_joins_the_grid_that_the_swarm_has_and_takes_its_settings() -> None:
    dht, owner, volunteer = FakeDht(), Identity.generate(), Identity.generate()
    created, new = asyncio.run(
        create_or_enter(
            dht.directory(owner.peer_id), grid(optimizer={"learning_rate": 0.5}), (), owner, FixedClock()
        )
    )
    assert new
    entered, new = asyncio.run(
        create_or_enter(dht.directory(volunteer.peer_id), grid(), {"experts"}, volunteer, FixedClock())
    )
    assert not new
    assert entered == created
    assert entered.grid.optimizer.learning_rate == 0.5
    assert asyncio.run(dht.directory().find(None, grid=True)) == created
    assert asyncio.run(dht.directory().find("ffn", grid=True)) == created
    with pytest.raises(UsageError, match=r"no run that trains, but the grid grid\.ffn@"):
        asyncio.run(dht.directory().find(None))


def test_the_owner_publishes_a_change_by_offering_it() -> None:
    dht, owner = FakeDht(), Identity.generate()
    directory = dht.directory(owner.peer_id)
    asyncio.run(create_or_enter(directory, grid(), (), owner, FixedClock()))
    changed, new = asyncio.run(create_or_enter(directory, grid(average_s=5.0), (), owner, FixedClock()))
    assert (changed.version, changed.grid.average_s, new) == (2, 5.0, False)


def test_two_grids_of_one_name_are_told_apart_by_the_user() -> None:
    dht = FakeDht()
    for owner in (Identity.generate(), Identity.generate()):
        asyncio.run(dht.directory(owner.peer_id).publish(signed(owner)))
    stranger = Identity.generate()
    with pytest.raises(UsageError, match=r"2 grids have this name: grid\.ffn@.*--grid NAME@ID"):
        asyncio.run(create_or_enter(dht.directory(), grid(), (), stranger, FixedClock()))


def test_a_server_with_an_invite_creates_no_other_grid_and_finds_its_own_among_several() -> None:
    """Regression: the other grid was published before it was refused. From then on, further servers with an
    invite were told to choose one of two grids.
    """
    dht, owner, volunteer = FakeDht(), Identity.generate(), Identity.generate()
    own = signed(owner, members="invited")
    asyncio.run(dht.directory(owner.peer_id).publish(own))
    directory = dht.directory(volunteer.peer_id)
    invite = SimpleNamespace(name=own.name)
    membership = cast(Any, SimpleNamespace(run_id=own.run_id, invite=invite))
    other = grid(experts="other.[0:3]", members="invited")
    with pytest.raises(UsageError, match=r"this invite is to grid\.ffn@.*the swarm has no grid\.other"):
        asyncio.run(
            create_or_enter(directory, other, {"experts"}, volunteer, FixedClock(), membership=membership)
        )
    assert [one.name for one in asyncio.run(directory.listings())] == ["grid.ffn"]
    asyncio.run(dht.directory(volunteer.peer_id).publish(sign(other, volunteer, version=1, created_s=0.0)))
    with pytest.raises(UsageError, match=r"2 grids match: .*--grid NAME@ID"):
        asyncio.run(found_run(directory, None, grid=True))
    assert asyncio.run(found_run(directory, None, grid=True, membership=membership)) == own


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        (
            {"optimizer": {"learning_rate": 0.1}},
            {"optimizer.learning_rate"},
            "learning_rate is 0.001, not 0.1",
        ),
        ({"hidden_dim": 8}, {"hidden_dim"}, "hidden_dim is 1024, not 8"),
        ({"experts": "ffn.[0:3].[0:4]"}, {"experts"}, "it has no experts ffn.[0:3].[0:4]"),
        ({"experts": "ffn.[0:2]"}, {"experts"}, "it has no experts ffn.[0:2]"),
    ],
    ids=["rate", "width", "beyond", "other-depth"],
)
def test_options_that_contradict_the_grid_are_named(
    changes: dict[str, object], given: set[str], message: str
) -> None:
    one = signed(Identity.generate())
    check_agrees(one, grid(**changes), ())  # default values never contradict
    with pytest.raises(UsageError) as caught:
        check_agrees(one, grid(**changes), given)
    assert message in str(caught.value)


def test_some_experts_of_the_grid_may_be_hosted() -> None:
    check_agrees(signed(Identity.generate()), grid(experts=["ffn.1.[2:4]", "ffn.0.0"]), {"experts"})


def test_the_file_of_a_users_own_class_must_be_the_grids(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    mine.write_text("def make(settings): ...\n")
    other.write_text("def make(settings): return 1\n")
    assert module_hash(mine) == hashlib.sha256(mine.read_bytes()).hexdigest()
    owner = Identity.generate()
    with_module = signed(owner, module=module_hash(mine))
    check_module(with_module, mine)
    check_module(signed(owner), None)
    with pytest.raises(UsageError, match="is not the file of"):
        check_module(with_module, other)
    with pytest.raises(UsageError, match=r"get it from the owner, read it, and pass it with --module"):
        check_module(with_module, None)
    with pytest.raises(UsageError, match="leave --module out"):
        check_module(signed(owner), mine)


def test_an_owner_revokes_and_ends_but_cannot_pause_a_grid() -> None:
    owner, banned = Identity.generate(), Identity.generate().peer_id
    one = signed(owner)
    after = sign_change(one, Change(ended=True, ban=(str(banned),)), owner)
    assert after.grid.ended
    assert after.grid.banned_peers == {banned}
    assert not restart_needed(one.grid, after.grid)
    assert restart_needed(one.grid, grid(hidden_dim=8))
    with pytest.raises(UsageError, match="paused is not a known key"):
        sign_change(one, Change(paused=True), owner)


def test_experts_are_made_as_the_grid_says() -> None:
    settings = {
        "name": "sgd",
        "learning_rate": 0.25,
        "clip_norm": 3.0,
        "warmup_steps": 2,
        "training_steps": 6,
        "target_batch_size": 96,
    }
    factory = ExpertFactory(
        grid(hidden_dim=8, dtype="bfloat16", optimizer=settings),
        device="cpu",
        module=None,
        keep_activations_bytes=0,
    )
    expert = factory.make(ExpertUid.parse("ffn.0.1"))
    assert str(expert.schema) == "(bfloat16(batch, 8)) -> bfloat16(batch, 8)"
    assert (expert.clip_norm, expert.target_batch_size) == (3.0, 96)


def small_factory(**settings: Any) -> ExpertFactory:
    return ExpertFactory(grid(hidden_dim=64, **settings), device="cpu", module=None, keep_activations_bytes=0)


@pytest.mark.parametrize(
    ("settings", "each", "shared"),
    [
        ({}, 16, 12),
        ({"optimizer": {"name": "sgd"}}, 8, 4),
        ({"optimizer": {"name": "none"}}, 4, 0),
        ({"dtype": "bfloat16"}, 16, 12),
        ({"optimizer": {"target_batch_size": 64}}, 20, 12),
    ],
    ids=["adam", "sgd", "frozen", "bfloat16", "target-batch"],
)
def test_the_memory_of_an_expert_has_its_gradients_and_its_optimizer(
    settings: dict[str, Any], each: int, shared: int
) -> None:
    """`each` and `shared`: bytes per parameter. Regression: the copies from which a step can be undone, and
    the gradients of a target batch, were left out: a single expert took twice as much as it was said to.
    """
    factory = small_factory(**settings)
    module = factory.make(ExpertUid.parse("ffn.0.1")).module
    parameters = sum(one.numel() for one in module.parameters())
    assert factory.memory() == ExpertMemory(each=each * parameters, shared=shared * parameters)


def test_experts_that_do_not_fit_into_memory_are_refused_with_how_many_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the process was killed, or ended with a traceback."""
    names = list(grid().patterns[0].names())[:3]
    factory = small_factory()
    needed = factory.memory()
    monkeypatch.setattr(grid_experts, "free_bytes", lambda device: int(2.5 * needed.each) + needed.shared)
    assert list(factory.make_all(names[:2])) == names[:2]
    with pytest.raises(
        UsageError, match=r"3 experts .* do not fit into the memory of cpu, and 2 would: host 2 with"
    ):
        factory.make_all(names)
    monkeypatch.setattr(grid_experts, "free_bytes", lambda device: None)
    made = iter([factory.make(names[0])])

    def make(uid: ExpertUid) -> Any:
        for one in made:
            return one
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(factory, "make", make)
    with pytest.raises(UsageError, match=r"3 experts .*, and 1 would: host 1 with"):
        factory.make_all(names)


@pytest.mark.parametrize(("memory", "count"), [("1M", 1), ("1.6M", 2), ("1G", 16), ("900k", None)])
def test_memory_says_how_many_experts_are_hosted(memory: str, count: int | None) -> None:
    arguments = ["--experts", "ffn.[0:4].[0:4]", "--hidden-dim", "64", "--memory", memory]
    arguments += ["--listen", "127.0.0.1:0"]
    choices = ServeChoices.of(serve.make_context("serve", arguments))
    offered = choices.offered()
    assert offered is not None
    factory = choices.factory(offered)
    node = cast(Any, SimpleNamespace(peer_id=Identity.generate().peer_id))
    if count is None:
        with pytest.raises(UsageError, match="--memory 900k is less than one expert takes: "):
            choices.placing(offered, node, factory)
    else:
        assert choices.placing(offered, node, factory).count == count


def test_experts_may_be_compiled_before_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bool] = []

    def backend(graph: Any, examples: Any) -> Any:
        compiled.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, settings = small_factory(), grid(hidden_dim=64)
    factory = ExpertFactory(settings, device="cpu", module=None, keep_activations_bytes=0, is_compiled=True)
    uid = ExpertUid.parse("ffn.0.1")
    one, same = factory.make(uid), plain.make(uid)
    assert set(compiled) == {False, True}, "for forward and for backward passes"
    count = len(compiled)
    for samples in (2, 5, 9):
        x, gradient = torch.randn(samples, 64), torch.randn(samples, 64)
        assert torch.allclose(one.forward([x])[0], same.forward([x])[0], atol=1e-6)
        found, wanted = (expert.backward([(None, [x], [gradient])]) for expert in (one, same))
        assert torch.allclose(found[0][0], wanted[0][0], atol=1e-6)  # type: ignore[arg-type]
    assert len(compiled) == count, "batches of any size need no further compilation"
    assert one.module.state_dict().keys() == same.module.state_dict().keys()
    for parameter, other in zip(one.module.parameters(), same.module.parameters(), strict=True):
        assert torch.allclose(parameter, other, atol=1e-6)


def test_experts_may_be_computed_under_autocast() -> None:
    """Regression: `swarm.Expert` had it, and `swarm serve` did not."""
    options = ["--experts", "ffn.[0:2]", "--hidden-dim", "64", "--autocast", "bfloat16"]
    choices = ServeChoices.of(serve.make_context("serve", options))
    offered = choices.offered()
    assert offered is not None
    uid = ExpertUid.parse("ffn.0")
    one, plain = choices.factory(offered).make(uid), small_factory().make(uid)
    assert (one.autocast, plain.autocast) == (torch.bfloat16, None)
    x = torch.randn(4, 64)
    (y,), (wanted,) = one.forward([x]), one.module(x).detach()[None]
    assert y.dtype == torch.float32
    assert not torch.equal(y, wanted)
    assert torch.allclose(y, wanted, atol=0.05)
    assert one.schema.digest == plain.schema.digest


def test_a_failing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, examples: Any) -> Any:
        raise RuntimeError("no compiler was found")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    factory = ExpertFactory(
        grid(hidden_dim=64), device="cpu", module=None, keep_activations_bytes=0, is_compiled=True
    )
    with pytest.raises(UsageError, match=r"(?s)leave --compile out: .*no compiler was found"):
        factory.make(ExpertUid.parse("ffn.0.1"))


def test_activations_of_a_grid_may_be_codes_of_a_lower_rank() -> None:
    factory = small_factory(expert_class="causal_transformer", sequence_length=12, activation_rank=8)
    expert = factory.make(ExpertUid.parse("ffn.0.1"))
    assert str(expert.schema) == "(float32(batch, 1 to 12, 8)) -> float32(batch, 1 to 12, 8)"
    assert not expert.expert_class, "its class alone would make another module"
    buffers = sum(one.nbytes for one in expert.module.buffers())
    assert factory.memory().each == 16 * sum(one.numel() for one in expert.module.parameters()) + buffers
    with pytest.raises(UsageError, match="activation_rank is at most hidden_dim"):
        grid(hidden_dim=64, activation_rank=65)


def weights(seed: int, name: str) -> torch.Tensor:
    factory = ExpertFactory(
        grid(hidden_dim=8, seed=seed), device="cpu", module=None, keep_activations_bytes=0
    )
    return next(factory.make(ExpertUid.parse(name)).module.parameters()).detach()


def test_replicas_of_an_expert_start_equal_and_other_experts_differ() -> None:
    torch.manual_seed(1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    one = weights(7, "ffn.0.1")
    assert torch.equal(torch.rand(3), drawn), "the caller's generator is left as it was"
    torch.manual_seed(2)
    assert torch.equal(weights(7, "ffn.0.1"), one)
    assert not torch.equal(weights(7, "ffn.1.0"), one)
    assert not torch.equal(weights(8, "ffn.0.1"), one)


@pytest.mark.parametrize(
    ("options", "members", "guests", "bounds"),
    [
        ((), "invited", "call", (None, None)),
        (("--open",), "open", "call", (1.0, 0.1)),
        (("--open-training",), "invited", "train", (1.0, 0.1)),
        (("--open-training", "--clip-norm", "5"), "invited", "train", (5.0, 0.1)),
    ],
)
def test_options_say_what_peers_without_an_invite_may_do(
    options: tuple[str, ...], members: str, guests: str, bounds: tuple[float | None, float | None]
) -> None:
    context = serve.make_context("serve", ["--experts", "ffn.0", "--listen", "127.0.0.1:0", *options])
    grid = ServeChoices.of(context).offered()
    assert grid is not None
    assert (grid.members, grid.guests, grid.step_bounds) == (members, guests, bounds)
