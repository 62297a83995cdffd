from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Claim(_message.Message):
    __slots__ = ("epoch", "samples", "samples_per_s", "at_s", "since_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    samples: int
    samples_per_s: float
    at_s: float
    since_s: float
    def __init__(self, epoch: _Optional[int] = ..., samples: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., at_s: _Optional[float] = ..., since_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "claim", "full", "goodbye")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    run: str
    claim: Claim
    full: bool
    goodbye: bool
    def __init__(self, run: _Optional[str] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., full: _Optional[bool] = ..., goodbye: _Optional[bool] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("claim", "believed")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    BELIEVED_FIELD_NUMBER: _ClassVar[int]
    claim: Claim
    believed: bool
    def __init__(self, claim: _Optional[_Union[Claim, _Mapping]] = ..., believed: _Optional[bool] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("run", "epoch_min", "digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MIN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch_min: int
    digest: bytes
    def __init__(self, run: _Optional[str] = ..., epoch_min: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("lease", "epoch", "canonical", "total_bytes", "chunk_digests")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    epoch: int
    canonical: bool
    total_bytes: int
    chunk_digests: bytes
    def __init__(self, lease: _Optional[bytes] = ..., epoch: _Optional[int] = ..., canonical: _Optional[bool] = ..., total_bytes: _Optional[int] = ..., chunk_digests: _Optional[bytes] = ...) -> None: ...

class ChunksRequest(_message.Message):
    __slots__ = ("run", "lease", "indices")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease: bytes
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., lease: _Optional[bytes] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ChunkHeader(_message.Message):
    __slots__ = ("index",)
    INDEX_FIELD_NUMBER: _ClassVar[int]
    index: int
    def __init__(self, index: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("run", "lease")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease: bytes
    def __init__(self, run: _Optional[str] = ..., lease: _Optional[bytes] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
