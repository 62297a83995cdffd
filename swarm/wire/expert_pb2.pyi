from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExpertPass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERT_FORWARD: _ClassVar[ExpertPass]
    EXPERT_BACKWARD: _ClassVar[ExpertPass]

class ExpertStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERT_OK: _ClassVar[ExpertStatus]
    EXPERT_OVERLOADED: _ClassVar[ExpertStatus]
    EXPERT_MISSING: _ClassVar[ExpertStatus]
    EXPERT_REFUSED: _ClassVar[ExpertStatus]
    EXPERT_FAILED: _ClassVar[ExpertStatus]
    EXPERT_APPLIED: _ClassVar[ExpertStatus]
    EXPERT_FORGOTTEN: _ClassVar[ExpertStatus]
    EXPERT_STALE: _ClassVar[ExpertStatus]
    EXPERT_NOT_INVITED: _ClassVar[ExpertStatus]
EXPERT_FORWARD: ExpertPass
EXPERT_BACKWARD: ExpertPass
EXPERT_OK: ExpertStatus
EXPERT_OVERLOADED: ExpertStatus
EXPERT_MISSING: ExpertStatus
EXPERT_REFUSED: ExpertStatus
EXPERT_FAILED: ExpertStatus
EXPERT_APPLIED: ExpertStatus
EXPERT_FORGOTTEN: ExpertStatus
EXPERT_STALE: ExpertStatus
EXPERT_NOT_INVITED: ExpertStatus

class DescribeRequest(_message.Message):
    __slots__ = ("uids", "with_lineage")
    UIDS_FIELD_NUMBER: _ClassVar[int]
    WITH_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    uids: _containers.RepeatedScalarFieldContainer[str]
    with_lineage: bool
    def __init__(self, uids: _Optional[_Iterable[str]] = ..., with_lineage: _Optional[bool] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("experts",)
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedCompositeFieldContainer[ExpertDescription]
    def __init__(self, experts: _Optional[_Iterable[_Union[ExpertDescription, _Mapping]]] = ...) -> None: ...

class ExpertDescription(_message.Message):
    __slots__ = ("uid", "schema", "version", "batch_size_max", "frozen", "wait_s", "samples_per_s", "past", "turns", "expert_class")
    UID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_MAX_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_CLASS_FIELD_NUMBER: _ClassVar[int]
    uid: str
    schema: bytes
    version: int
    batch_size_max: int
    frozen: bool
    wait_s: float
    samples_per_s: float
    past: _containers.RepeatedCompositeFieldContainer[ExpertCommonVersion]
    turns: int
    expert_class: str
    def __init__(self, uid: _Optional[str] = ..., schema: _Optional[bytes] = ..., version: _Optional[int] = ..., batch_size_max: _Optional[int] = ..., frozen: _Optional[bool] = ..., wait_s: _Optional[float] = ..., samples_per_s: _Optional[float] = ..., past: _Optional[_Iterable[_Union[ExpertCommonVersion, _Mapping]]] = ..., turns: _Optional[int] = ..., expert_class: _Optional[str] = ...) -> None: ...

class ExpertCommonVersion(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    version: int
    def __init__(self, name: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class ExpertStateRequest(_message.Message):
    __slots__ = ("uid", "schema_digest", "parameters_only")
    UID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_ONLY_FIELD_NUMBER: _ClassVar[int]
    uid: str
    schema_digest: bytes
    parameters_only: bool
    def __init__(self, uid: _Optional[str] = ..., schema_digest: _Optional[bytes] = ..., parameters_only: _Optional[bool] = ...) -> None: ...

class ExpertStateReply(_message.Message):
    __slots__ = ("status", "reason", "payload_bytes", "version", "past")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    status: ExpertStatus
    reason: str
    payload_bytes: int
    version: int
    past: _containers.RepeatedCompositeFieldContainer[ExpertCommonVersion]
    def __init__(self, status: _Optional[_Union[ExpertStatus, str]] = ..., reason: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., version: _Optional[int] = ..., past: _Optional[_Iterable[_Union[ExpertCommonVersion, _Mapping]]] = ...) -> None: ...

class ExpertCount(_message.Message):
    __slots__ = ("uid", "schema_digest", "version", "head", "samples")
    UID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    uid: str
    schema_digest: bytes
    version: int
    head: bytes
    samples: int
    def __init__(self, uid: _Optional[str] = ..., schema_digest: _Optional[bytes] = ..., version: _Optional[int] = ..., head: _Optional[bytes] = ..., samples: _Optional[int] = ...) -> None: ...

class ExpertRequest(_message.Message):
    __slots__ = ("kind", "uid", "schema_digest", "batch", "tensors", "payload", "payload_bytes", "request_id", "version", "keep", "reply_codec", "reply_codec_version", "inputs_kept", "staleness_max", "sequence_length", "more")
    KIND_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    REPLY_CODEC_FIELD_NUMBER: _ClassVar[int]
    REPLY_CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_KEPT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MAX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    kind: ExpertPass
    uid: str
    schema_digest: bytes
    batch: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    payload: bytes
    payload_bytes: int
    request_id: bytes
    version: int
    keep: bool
    reply_codec: int
    reply_codec_version: int
    inputs_kept: bool
    staleness_max: int
    sequence_length: int
    more: _containers.RepeatedCompositeFieldContainer[ExpertRequest]
    def __init__(self, kind: _Optional[_Union[ExpertPass, str]] = ..., uid: _Optional[str] = ..., schema_digest: _Optional[bytes] = ..., batch: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., payload: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., request_id: _Optional[bytes] = ..., version: _Optional[int] = ..., keep: _Optional[bool] = ..., reply_codec: _Optional[int] = ..., reply_codec_version: _Optional[int] = ..., inputs_kept: _Optional[bool] = ..., staleness_max: _Optional[int] = ..., sequence_length: _Optional[int] = ..., more: _Optional[_Iterable[_Union[ExpertRequest, _Mapping]]] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("codec", "codec_version", "payload_bytes", "absent")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    codec: int
    codec_version: int
    payload_bytes: int
    absent: bool
    def __init__(self, codec: _Optional[int] = ..., codec_version: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., absent: _Optional[bool] = ...) -> None: ...

class ExpertReply(_message.Message):
    __slots__ = ("status", "reason", "queued", "version", "tensors", "payload", "payload_bytes", "wait_s", "kept", "more", "part", "parts")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    status: ExpertStatus
    reason: str
    queued: int
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorHeader]
    payload: bytes
    payload_bytes: int
    wait_s: float
    kept: bool
    more: _containers.RepeatedCompositeFieldContainer[ExpertReply]
    part: int
    parts: int
    def __init__(self, status: _Optional[_Union[ExpertStatus, str]] = ..., reason: _Optional[str] = ..., queued: _Optional[int] = ..., version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorHeader, _Mapping]]] = ..., payload: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., wait_s: _Optional[float] = ..., kept: _Optional[bool] = ..., more: _Optional[_Iterable[_Union[ExpertReply, _Mapping]]] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...
