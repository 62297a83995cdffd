from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeRequest(_message.Message):
    __slots__ = ("run", "specification")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SPECIFICATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    specification: bytes
    def __init__(self, run: _Optional[str] = ..., specification: _Optional[bytes] = ...) -> None: ...

class ChangeReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("run", "capability", "handover")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    run: str
    capability: bytes
    handover: bytes
    def __init__(self, run: _Optional[str] = ..., capability: _Optional[bytes] = ..., handover: _Optional[bytes] = ...) -> None: ...

class AdmitReply(_message.Message):
    __slots__ = ("member", "capability", "handover")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    member: bool
    capability: bytes
    handover: bytes
    def __init__(self, member: _Optional[bool] = ..., capability: _Optional[bytes] = ..., handover: _Optional[bytes] = ...) -> None: ...
