from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Contact(_message.Message):
    __slots__ = ("peer_id", "addresses")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer_id: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("contact", "agent", "observed", "relay_port", "relayed")
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    RELAY_PORT_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    contact: Contact
    agent: str
    observed: str
    relay_port: int
    relayed: Relayed
    def __init__(self, contact: _Optional[_Union[Contact, _Mapping]] = ..., agent: _Optional[str] = ..., observed: _Optional[str] = ..., relay_port: _Optional[int] = ..., relayed: _Optional[_Union[Relayed, _Mapping]] = ...) -> None: ...

class Relayed(_message.Message):
    __slots__ = ("reservations", "circuits", "carried_bytes", "refused")
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    CIRCUITS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    reservations: int
    circuits: int
    carried_bytes: int
    refused: int
    def __init__(self, reservations: _Optional[int] = ..., circuits: _Optional[int] = ..., carried_bytes: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class DialBackRequest(_message.Message):
    __slots__ = ("port", "relay")
    PORT_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    port: int
    relay: bool
    def __init__(self, port: _Optional[int] = ..., relay: _Optional[bool] = ...) -> None: ...

class DialBackReply(_message.Message):
    __slots__ = ("reached", "observed")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    reached: bool
    observed: str
    def __init__(self, reached: _Optional[bool] = ..., observed: _Optional[str] = ...) -> None: ...

class BulkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BulkReply(_message.Message):
    __slots__ = ("port", "grpc_port", "secret")
    PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    port: int
    grpc_port: int
    secret: bytes
    def __init__(self, port: _Optional[int] = ..., grpc_port: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...
