from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Claim(_message.Message):
    __slots__ = ("epoch", "samples", "samples_per_s", "at_s", "since_s", "head", "abstains", "joining")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ABSTAINS_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    samples: int
    samples_per_s: float
    at_s: float
    since_s: float
    head: bytes
    abstains: bool
    joining: bool
    def __init__(self, epoch: _Optional[int] = ..., samples: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., at_s: _Optional[float] = ..., since_s: _Optional[float] = ..., head: _Optional[bytes] = ..., abstains: _Optional[bool] = ..., joining: _Optional[bool] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "claim", "full", "goodbye", "farewell")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    run: str
    claim: Claim
    full: bool
    goodbye: bool
    farewell: bytes
    def __init__(self, run: _Optional[str] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., full: _Optional[bool] = ..., goodbye: _Optional[bool] = ..., farewell: _Optional[bytes] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("claim", "believed")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    BELIEVED_FIELD_NUMBER: _ClassVar[int]
    claim: Claim
    believed: bool
    def __init__(self, claim: _Optional[_Union[Claim, _Mapping]] = ..., believed: _Optional[bool] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("run", "epoch_min", "digest", "reserve", "codec", "only_digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_MIN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ONLY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch_min: int
    digest: bytes
    reserve: bool
    codec: str
    only_digest: bool
    def __init__(self, run: _Optional[str] = ..., epoch_min: _Optional[int] = ..., digest: _Optional[bytes] = ..., reserve: _Optional[bool] = ..., codec: _Optional[str] = ..., only_digest: _Optional[bool] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("lease", "epoch", "canonical", "total_bytes", "chunk_digests", "digest")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    epoch: int
    canonical: bool
    total_bytes: int
    chunk_digests: bytes
    digest: bytes
    def __init__(self, lease: _Optional[bytes] = ..., epoch: _Optional[int] = ..., canonical: _Optional[bool] = ..., total_bytes: _Optional[int] = ..., chunk_digests: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ChunksRequest(_message.Message):
    __slots__ = ("run", "lease", "indices")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease: bytes
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., lease: _Optional[bytes] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

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

class HistoryRequest(_message.Message):
    __slots__ = ("run", "heads")
    RUN_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    run: str
    heads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run: _Optional[str] = ..., heads: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("peer", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    signature: bytes
    def __init__(self, peer: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("chain", "declines", "goodbyes", "abstains")
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    DECLINES_FIELD_NUMBER: _ClassVar[int]
    GOODBYES_FIELD_NUMBER: _ClassVar[int]
    ABSTAINS_FIELD_NUMBER: _ClassVar[int]
    chain: bytes
    declines: bool
    goodbyes: _containers.RepeatedCompositeFieldContainer[Goodbye]
    abstains: bool
    def __init__(self, chain: _Optional[bytes] = ..., declines: _Optional[bool] = ..., goodbyes: _Optional[_Iterable[_Union[Goodbye, _Mapping]]] = ..., abstains: _Optional[bool] = ...) -> None: ...

class ReceiptRequest(_message.Message):
    __slots__ = ("run", "certificates", "head", "signatures")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    run: str
    certificates: int
    head: bytes
    signatures: _containers.RepeatedCompositeFieldContainer[ReceiptSignature]
    def __init__(self, run: _Optional[str] = ..., certificates: _Optional[int] = ..., head: _Optional[bytes] = ..., signatures: _Optional[_Iterable[_Union[ReceiptSignature, _Mapping]]] = ...) -> None: ...

class ReceiptSignature(_message.Message):
    __slots__ = ("peer", "signature")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer: bytes
    signature: bytes
    def __init__(self, peer: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ReceiptReply(_message.Message):
    __slots__ = ("receipt", "signatures")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    receipt: bytes
    signatures: _containers.RepeatedCompositeFieldContainer[ReceiptSignature]
    def __init__(self, receipt: _Optional[bytes] = ..., signatures: _Optional[_Iterable[_Union[ReceiptSignature, _Mapping]]] = ...) -> None: ...
