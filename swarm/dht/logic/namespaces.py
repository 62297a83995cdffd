"""Rules per namespace about writers and values, applied by replicas to what they store and by readers to what
they receive.

    scores = NamespaceRules(schema=Table({"score": Number(0, 1)}), writers=frozenset({judge}))
    node.dht.register("scores", scores)
    node.dht.register("run.abc", NamespaceRules(entries_per_writer_max=1, name="report.*"))

A record must pass every rule that matches its namespace and name; a record that no rule matches is accepted.
Registered rules hold on this peer only: as a replica it stores nothing else, as a reader it returns nothing
else, and as a writer it gets an error at once. Peers that did not register them store what they are given, so
a rule protects its readers everywhere and its replicas where it is known. All peers know the rules for a
run's own names (`run_rules`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

from swarm.core.errors import UsageError
from swarm.core.ids import Key
from swarm.dht.logic.blobs import is_blob_key
from swarm.dht.logic.records import TTL_MAX_US, VALUE_BYTES_MAX, Record, decode_value, is_run_namespace
from swarm.dht.logic.rules import NamespaceRules
from swarm.dht.logic.run_rules import CATALOGUE, CATALOGUE_RULES, RUN_RULES

_RULES_MAX = 1024
_FOUND_MAX = 1024  # keys whose rules are remembered


class Namespaces:
    """The rules that one peer knows."""

    def __init__(self) -> None:
        self._registered: dict[tuple[str, str], NamespaceRules] = {}
        self._found: dict[Key, tuple[NamespaceRules, ...]] = {}
        self._changes = 0

    def register(self, namespace: str, rules: NamespaceRules) -> None:
        """Add rules for a namespace. They replace rules registered for the same namespace and `rules.name`,
        and apply in addition to all others.
        """
        Key(namespace, "x")  # raises UsageError for an invalid namespace
        if (namespace, rules.name) not in self._registered and len(self._registered) >= _RULES_MAX:
            raise UsageError(f"at most {_RULES_MAX} rules can be registered")
        self._registered[namespace, rules.name] = rules
        self._found.clear()
        self._changes += 1

    @property
    def changes(self) -> int:
        """Return how often rules were registered so far."""
        return self._changes

    def rules(self, key: Key) -> tuple[NamespaceRules, ...]:
        """Return every rule that matches a key. Each record that is stored asks three times, and most are
        under a few keys of a run.
        """
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _FOUND_MAX:  # a stranger names keys that are never asked for again
                self._found.clear()
            found = self._found[key] = tuple(self._matching(key))
        return found

    def _matching(self, key: Key) -> Iterator[NamespaceRules]:
        for (namespace, name), rules in self._registered.items():
            if namespace == key.namespace and fnmatch.fnmatchcase(key.name, name):
                yield rules
        if key.namespace == CATALOGUE:
            yield CATALOGUE_RULES
        if is_run_namespace(key.namespace):
            yield from (rules for rules in RUN_RULES if fnmatch.fnmatchcase(key.name, rules.name))

    def refusal(self, record: Record) -> str | None:
        """Return why a record breaks the rules of its key, or None. Quotas are checked by `Storage`."""
        if is_blob_key(record.key) and not record.is_blob:
            return f"{record.key} takes nothing but the run's signed specification"
        for rules in self.rules(record.key):
            reason = _refusal(rules, record)
            if reason:
                return reason
        return None

    def entries_per_writer_max(self, key: Key) -> int | None:
        """Return how many entries one writer may have under this key; None when no rule limits them."""
        return _least(rules.entries_per_writer_max for rules in self.rules(key))

    def entries_max(self, key: Key) -> int | None:
        """Return how many entries this key may have; None when no rule limits them."""
        return _least(rules.entries_max for rules in self.rules(key))


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _refusal(rules: NamespaceRules, record: Record) -> str | None:
    key = record.key
    if rules.writers is not None and record.writer not in rules.writers:
        return f"{record.writer.short} is not among those who may write {key}"
    if rules.subkey_is_writer and record.subkey != str(record.writer):
        return f"under {key} an entry's subkey is its writer's PeerID"
    if record.deleted:
        # A tombstone may outlive the entry that it hides: a writer that no longer knows the entry's lifetime
        # uses the maximum.
        return None
    if (
        rules.ttl_s_max * 1e6 < TTL_MAX_US
        and not record.is_blob
        and record.expiration_us - record.issued_at_us > rules.ttl_s_max * 1e6
    ):
        return f"under {key} an entry lives at most {rules.ttl_s_max:g} s"
    if rules.value_bytes_max < VALUE_BYTES_MAX and len(record.value) > rules.value_bytes_max:
        return f"under {key} a value has at most {rules.value_bytes_max} bytes, not {len(record.value)}"
    if rules.schema is not None and not record.is_blob:
        reason = rules.schema.refusal(decode_value(record.value))
        return f"under {key} the value {reason}" if reason else None
    return None
