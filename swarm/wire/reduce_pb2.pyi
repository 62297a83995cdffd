from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeHeader(_message.Message):
    __slots__ = ("open", "contribution", "withdrawal", "average", "refusal", "waiting", "pieces", "padding")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    open: ExchangeOpen
    contribution: ExchangeContribution
    withdrawal: ExchangeWithdrawal
    average: ExchangeAverage
    refusal: ExchangeRefusal
    waiting: ExchangeWaiting
    pieces: ExchangePieces
    padding: bytes
    def __init__(self, open: _Optional[_Union[ExchangeOpen, _Mapping]] = ..., contribution: _Optional[_Union[ExchangeContribution, _Mapping]] = ..., withdrawal: _Optional[_Union[ExchangeWithdrawal, _Mapping]] = ..., average: _Optional[_Union[ExchangeAverage, _Mapping]] = ..., refusal: _Optional[_Union[ExchangeRefusal, _Mapping]] = ..., waiting: _Optional[_Union[ExchangeWaiting, _Mapping]] = ..., pieces: _Optional[_Union[ExchangePieces, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

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

class ExchangePieces(_message.Message):
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
    __slots__ = ("place", "failed", "reason", "digest", "left_out", "number", "excluded", "committed")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    place: int
    failed: bool
    reason: str
    digest: bytes
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOut]
    number: int
    excluded: _containers.RepeatedScalarFieldContainer[int]
    committed: bool
    def __init__(self, place: _Optional[int] = ..., failed: _Optional[bool] = ..., reason: _Optional[str] = ..., digest: _Optional[bytes] = ..., left_out: _Optional[_Iterable[_Union[LeftOut, _Mapping]]] = ..., number: _Optional[int] = ..., excluded: _Optional[_Iterable[int]] = ..., committed: _Optional[bool] = ...) -> None: ...

class LeftOut(_message.Message):
    __slots__ = ("place", "reason")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    place: int
    reason: str
    def __init__(self, place: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class VoteRequest(_message.Message):
    __slots__ = ("group_id", "vote", "known")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    vote: Vote
    known: int
    def __init__(self, group_id: _Optional[bytes] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., known: _Optional[int] = ...) -> None: ...

class VoteReply(_message.Message):
    __slots__ = ("vote", "relayed", "dead", "state")
    VOTE_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    vote: Vote
    relayed: _containers.RepeatedCompositeFieldContainer[Vote]
    dead: _containers.RepeatedScalarFieldContainer[int]
    state: int
    def __init__(self, vote: _Optional[_Union[Vote, _Mapping]] = ..., relayed: _Optional[_Iterable[_Union[Vote, _Mapping]]] = ..., dead: _Optional[_Iterable[int]] = ..., state: _Optional[int] = ...) -> None: ...

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

class HeldRequest(_message.Message):
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

class HeldReply(_message.Message):
    __slots__ = ("held", "more", "sealed", "count", "wanted")
    HELD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[Version]
    more: bool
    sealed: bool
    count: int
    wanted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, held: _Optional[_Iterable[_Union[Version, _Mapping]]] = ..., more: _Optional[bool] = ..., sealed: _Optional[bool] = ..., count: _Optional[int] = ..., wanted: _Optional[_Iterable[int]] = ...) -> None: ...

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
