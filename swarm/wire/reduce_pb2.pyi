from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeHeader(_message.Message):
    __slots__ = ("open", "contribution", "withdrawal", "average", "refusal", "waiting", "left_out", "frames", "padding")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    open: ExchangeOpen
    contribution: ExchangeContribution
    withdrawal: ExchangeWithdrawal
    average: ExchangeAverage
    refusal: ExchangeRefusal
    waiting: ExchangeWaiting
    left_out: LeftOut
    frames: ExchangeFrames
    padding: bytes
    def __init__(self, open: _Optional[_Union[ExchangeOpen, _Mapping]] = ..., contribution: _Optional[_Union[ExchangeContribution, _Mapping]] = ..., withdrawal: _Optional[_Union[ExchangeWithdrawal, _Mapping]] = ..., average: _Optional[_Union[ExchangeAverage, _Mapping]] = ..., refusal: _Optional[_Union[ExchangeRefusal, _Mapping]] = ..., waiting: _Optional[_Union[ExchangeWaiting, _Mapping]] = ..., left_out: _Optional[_Union[LeftOut, _Mapping]] = ..., frames: _Optional[_Union[ExchangeFrames, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class ExchangeOpen(_message.Message):
    __slots__ = ("group_id", "codec", "codec_version", "plan_digest")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    codec: int
    codec_version: int
    plan_digest: bytes
    def __init__(self, group_id: _Optional[bytes] = ..., codec: _Optional[int] = ..., codec_version: _Optional[int] = ..., plan_digest: _Optional[bytes] = ...) -> None: ...

class ExchangeContribution(_message.Message):
    __slots__ = ("chunk", "signature")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    signature: bytes
    def __init__(self, chunk: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ExchangeWithdrawal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ExchangeAverage(_message.Message):
    __slots__ = ("chunk", "contributors", "clipped")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    contributors: bytes
    clipped: bytes
    def __init__(self, chunk: _Optional[int] = ..., contributors: _Optional[bytes] = ..., clipped: _Optional[bytes] = ...) -> None: ...

class ExchangeRefusal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ExchangeWaiting(_message.Message):
    __slots__ = ("place",)
    PLACE_FIELD_NUMBER: _ClassVar[int]
    place: int
    def __init__(self, place: _Optional[int] = ...) -> None: ...

class ExchangeFrames(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class AccountRequest(_message.Message):
    __slots__ = ("group_id", "chunk", "place")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    chunk: int
    place: int
    def __init__(self, group_id: _Optional[bytes] = ..., chunk: _Optional[int] = ..., place: _Optional[int] = ...) -> None: ...

class AccountReply(_message.Message):
    __slots__ = ("payload", "signature")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    signature: bytes
    def __init__(self, payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("group_id",)
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    def __init__(self, group_id: _Optional[bytes] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("state", "reason")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[HeartbeatReply.State]
        RUNNING: _ClassVar[HeartbeatReply.State]
        COMMITTED: _ClassVar[HeartbeatReply.State]
        FAILED: _ClassVar[HeartbeatReply.State]
    UNKNOWN: HeartbeatReply.State
    RUNNING: HeartbeatReply.State
    COMMITTED: HeartbeatReply.State
    FAILED: HeartbeatReply.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: HeartbeatReply.State
    reason: str
    def __init__(self, state: _Optional[_Union[HeartbeatReply.State, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("voter", "result", "signature")
    VOTER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    voter: bytes
    result: bytes
    signature: bytes
    def __init__(self, voter: _Optional[bytes] = ..., result: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Intent(_message.Message):
    __slots__ = ("place", "result")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    place: int
    result: bytes
    def __init__(self, place: _Optional[int] = ..., result: _Optional[bytes] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("place", "reason")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    place: int
    reason: str
    def __init__(self, place: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("votes", "intents", "left_out", "gave_up")
    VOTES_FIELD_NUMBER: _ClassVar[int]
    INTENTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    GAVE_UP_FIELD_NUMBER: _ClassVar[int]
    votes: _containers.RepeatedCompositeFieldContainer[Vote]
    intents: _containers.RepeatedCompositeFieldContainer[Intent]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    gave_up: str
    def __init__(self, votes: _Optional[_Iterable[_Union[Vote, _Mapping]]] = ..., intents: _Optional[_Iterable[_Union[Intent, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., gave_up: _Optional[str] = ...) -> None: ...

class VoteRequest(_message.Message):
    __slots__ = ("group_id", "statement")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    statement: Statement
    def __init__(self, group_id: _Optional[bytes] = ..., statement: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class VoteReply(_message.Message):
    __slots__ = ("statement",)
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    statement: Statement
    def __init__(self, statement: _Optional[_Union[Statement, _Mapping]] = ...) -> None: ...

class EndorseRequest(_message.Message):
    __slots__ = ("run", "head", "epoch", "kind", "group_id", "contributors", "electors", "is_break", "result", "votes", "grid_rounds", "new_hour", "at_once", "seats", "known", "misses", "gone", "samples")
    RUN_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    ELECTORS_FIELD_NUMBER: _ClassVar[int]
    IS_BREAK_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    GRID_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEW_HOUR_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    run: str
    head: bytes
    epoch: int
    kind: int
    group_id: bytes
    contributors: _containers.RepeatedScalarFieldContainer[bytes]
    electors: _containers.RepeatedScalarFieldContainer[bytes]
    is_break: bool
    result: bytes
    votes: _containers.RepeatedCompositeFieldContainer[Vote]
    grid_rounds: int
    new_hour: bool
    at_once: int
    seats: int
    known: bytes
    misses: bytes
    gone: bytes
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., head: _Optional[bytes] = ..., epoch: _Optional[int] = ..., kind: _Optional[int] = ..., group_id: _Optional[bytes] = ..., contributors: _Optional[_Iterable[bytes]] = ..., electors: _Optional[_Iterable[bytes]] = ..., is_break: _Optional[bool] = ..., result: _Optional[bytes] = ..., votes: _Optional[_Iterable[_Union[Vote, _Mapping]]] = ..., grid_rounds: _Optional[int] = ..., new_hour: _Optional[bool] = ..., at_once: _Optional[int] = ..., seats: _Optional[int] = ..., known: _Optional[bytes] = ..., misses: _Optional[bytes] = ..., gone: _Optional[bytes] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class EndorseReply(_message.Message):
    __slots__ = ("vote", "refusal")
    VOTE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    vote: Vote
    refusal: str
    def __init__(self, vote: _Optional[_Union[Vote, _Mapping]] = ..., refusal: _Optional[str] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("chunk", "attempt", "contributors", "digest", "clipped")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    attempt: int
    contributors: bytes
    digest: bytes
    clipped: bytes
    def __init__(self, chunk: _Optional[int] = ..., attempt: _Optional[int] = ..., contributors: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., clipped: _Optional[bytes] = ...) -> None: ...

class InventoryRequest(_message.Message):
    __slots__ = ("group_id", "reducer", "everything", "first_chunk", "wait", "known", "known_sealed")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REDUCER_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SEALED_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    reducer: int
    everything: bool
    first_chunk: int
    wait: bool
    known: int
    known_sealed: bool
    def __init__(self, group_id: _Optional[bytes] = ..., reducer: _Optional[int] = ..., everything: _Optional[bool] = ..., first_chunk: _Optional[int] = ..., wait: _Optional[bool] = ..., known: _Optional[int] = ..., known_sealed: _Optional[bool] = ...) -> None: ...

class InventoryReply(_message.Message):
    __slots__ = ("versions", "more", "sealed", "count", "wanted")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    more: bool
    sealed: bool
    count: int
    wanted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., more: _Optional[bool] = ..., sealed: _Optional[bool] = ..., count: _Optional[int] = ..., wanted: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("group_id", "chunk", "digest")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    chunk: int
    digest: bytes
    def __init__(self, group_id: _Optional[bytes] = ..., chunk: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("group_id", "chunk", "payload", "withdrawn")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    chunk: int
    payload: bytes
    withdrawn: str
    def __init__(self, group_id: _Optional[bytes] = ..., chunk: _Optional[int] = ..., payload: _Optional[bytes] = ..., withdrawn: _Optional[str] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
