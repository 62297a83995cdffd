from swarm.wire import peer_pb2 as _peer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DhtKey(_message.Message):
    __slots__ = ("namespace", "name")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    name: str
    def __init__(self, namespace: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DhtRecord(_message.Message):
    __slots__ = ("key", "subkey", "value", "issued_at_us", "expiration_us", "writer", "signature", "deleted", "lasting")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SUBKEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_US_FIELD_NUMBER: _ClassVar[int]
    EXPIRATION_US_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    LASTING_FIELD_NUMBER: _ClassVar[int]
    key: DhtKey
    subkey: str
    value: bytes
    issued_at_us: int
    expiration_us: int
    writer: bytes
    signature: bytes
    deleted: bool
    lasting: bool
    def __init__(self, key: _Optional[_Union[DhtKey, _Mapping]] = ..., subkey: _Optional[str] = ..., value: _Optional[bytes] = ..., issued_at_us: _Optional[int] = ..., expiration_us: _Optional[int] = ..., writer: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., deleted: _Optional[bool] = ..., lasting: _Optional[bool] = ...) -> None: ...

class DhtPingRequest(_message.Message):
    __slots__ = ("sender", "leaving")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    sender: _peer_pb2.Contact
    leaving: bool
    def __init__(self, sender: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., leaving: _Optional[bool] = ...) -> None: ...

class DhtPingReply(_message.Message):
    __slots__ = ("time_us", "contact")
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    time_us: int
    contact: _peer_pb2.Contact
    def __init__(self, time_us: _Optional[int] = ..., contact: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ...) -> None: ...

class DhtFindQuery(_message.Message):
    __slots__ = ("key", "target")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    key: DhtKey
    target: bytes
    def __init__(self, key: _Optional[_Union[DhtKey, _Mapping]] = ..., target: _Optional[bytes] = ...) -> None: ...

class DhtFindRequest(_message.Message):
    __slots__ = ("sender", "queries", "nearest_max", "known", "members", "have")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    NEAREST_MAX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    sender: _peer_pb2.Contact
    queries: _containers.RepeatedCompositeFieldContainer[DhtFindQuery]
    nearest_max: int
    known: bytes
    members: bool
    have: bytes
    def __init__(self, sender: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., queries: _Optional[_Iterable[_Union[DhtFindQuery, _Mapping]]] = ..., nearest_max: _Optional[int] = ..., known: _Optional[bytes] = ..., members: _Optional[bool] = ..., have: _Optional[bytes] = ...) -> None: ...

class DhtFindResult(_message.Message):
    __slots__ = ("records", "nearest", "members", "left_out")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NEAREST_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[DhtRecord]
    nearest: _containers.RepeatedCompositeFieldContainer[_peer_pb2.Contact]
    members: _containers.RepeatedCompositeFieldContainer[_peer_pb2.Contact]
    left_out: bool
    def __init__(self, records: _Optional[_Iterable[_Union[DhtRecord, _Mapping]]] = ..., nearest: _Optional[_Iterable[_Union[_peer_pb2.Contact, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[_peer_pb2.Contact, _Mapping]]] = ..., left_out: _Optional[bool] = ...) -> None: ...

class DhtFindReply(_message.Message):
    __slots__ = ("time_us", "results")
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    time_us: int
    results: _containers.RepeatedCompositeFieldContainer[DhtFindResult]
    def __init__(self, time_us: _Optional[int] = ..., results: _Optional[_Iterable[_Union[DhtFindResult, _Mapping]]] = ...) -> None: ...

class DhtStoreRequest(_message.Message):
    __slots__ = ("sender", "records", "target", "nearest_max", "known", "previous_us")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NEAREST_MAX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_US_FIELD_NUMBER: _ClassVar[int]
    sender: _peer_pb2.Contact
    records: _containers.RepeatedCompositeFieldContainer[DhtRecord]
    target: bytes
    nearest_max: int
    known: bytes
    previous_us: int
    def __init__(self, sender: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., records: _Optional[_Iterable[_Union[DhtRecord, _Mapping]]] = ..., target: _Optional[bytes] = ..., nearest_max: _Optional[int] = ..., known: _Optional[bytes] = ..., previous_us: _Optional[int] = ...) -> None: ...

class DhtStoreReply(_message.Message):
    __slots__ = ("time_us", "refusals", "nearest", "held")
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    NEAREST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    time_us: int
    refusals: _containers.RepeatedScalarFieldContainer[str]
    nearest: _containers.RepeatedCompositeFieldContainer[_peer_pb2.Contact]
    held: DhtRecord
    def __init__(self, time_us: _Optional[int] = ..., refusals: _Optional[_Iterable[str]] = ..., nearest: _Optional[_Iterable[_Union[_peer_pb2.Contact, _Mapping]]] = ..., held: _Optional[_Union[DhtRecord, _Mapping]] = ...) -> None: ...

class DhtHeldKey(_message.Message):
    __slots__ = ("key", "entries")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    key: DhtKey
    entries: bytes
    def __init__(self, key: _Optional[_Union[DhtKey, _Mapping]] = ..., entries: _Optional[bytes] = ...) -> None: ...

class DhtHoldsRequest(_message.Message):
    __slots__ = ("sender", "keys")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    sender: _peer_pb2.Contact
    keys: _containers.RepeatedCompositeFieldContainer[DhtHeldKey]
    def __init__(self, sender: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[DhtHeldKey, _Mapping]]] = ...) -> None: ...

class DhtHoldsReply(_message.Message):
    __slots__ = ("time_us", "wanted")
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    time_us: int
    wanted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, time_us: _Optional[int] = ..., wanted: _Optional[_Iterable[int]] = ...) -> None: ...
