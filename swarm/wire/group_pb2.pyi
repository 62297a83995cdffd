from swarm.wire import peer_pb2 as _peer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Seek(_message.Message):
    __slots__ = ("run", "averager", "contact", "round_key", "schema", "schema_text", "deadline_s", "can_lead", "now_s", "announce", "turn")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AVERAGER_FIELD_NUMBER: _ClassVar[int]
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    ROUND_KEY_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_TEXT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CAN_LEAD_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    run: str
    averager: str
    contact: _peer_pb2.Contact
    round_key: str
    schema: bytes
    schema_text: str
    deadline_s: float
    can_lead: bool
    now_s: float
    announce: bool
    turn: int
    def __init__(self, run: _Optional[str] = ..., averager: _Optional[str] = ..., contact: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., round_key: _Optional[str] = ..., schema: _Optional[bytes] = ..., schema_text: _Optional[str] = ..., deadline_s: _Optional[float] = ..., can_lead: _Optional[bool] = ..., now_s: _Optional[float] = ..., announce: _Optional[bool] = ..., turn: _Optional[int] = ...) -> None: ...

class GroupLeader(_message.Message):
    __slots__ = ("contact", "deadline_s")
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    contact: _peer_pb2.Contact
    deadline_s: float
    def __init__(self, contact: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class SeekAnswer(_message.Message):
    __slots__ = ("standing", "round_key", "deadline_s", "can_lead", "leader", "expected_s", "text", "now_s", "members", "turn")
    class Standing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[SeekAnswer.Standing]
        IDLE: _ClassVar[SeekAnswer.Standing]
        SEEKING: _ClassVar[SeekAnswer.Standing]
        FOLLOWING: _ClassVar[SeekAnswer.Standing]
        BUSY: _ClassVar[SeekAnswer.Standing]
        PASSED: _ClassVar[SeekAnswer.Standing]
        REFUSED: _ClassVar[SeekAnswer.Standing]
    UNKNOWN: SeekAnswer.Standing
    IDLE: SeekAnswer.Standing
    SEEKING: SeekAnswer.Standing
    FOLLOWING: SeekAnswer.Standing
    BUSY: SeekAnswer.Standing
    PASSED: SeekAnswer.Standing
    REFUSED: SeekAnswer.Standing
    STANDING_FIELD_NUMBER: _ClassVar[int]
    ROUND_KEY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CAN_LEAD_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    standing: SeekAnswer.Standing
    round_key: str
    deadline_s: float
    can_lead: bool
    leader: GroupLeader
    expected_s: float
    text: str
    now_s: float
    members: _containers.RepeatedScalarFieldContainer[bytes]
    turn: int
    def __init__(self, standing: _Optional[_Union[SeekAnswer.Standing, str]] = ..., round_key: _Optional[str] = ..., deadline_s: _Optional[float] = ..., can_lead: _Optional[bool] = ..., leader: _Optional[_Union[GroupLeader, _Mapping]] = ..., expected_s: _Optional[float] = ..., text: _Optional[str] = ..., now_s: _Optional[float] = ..., members: _Optional[_Iterable[bytes]] = ..., turn: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("seek", "weight", "bandwidth", "auxiliary", "gathered", "bandwidth_is_set", "grid_rounds", "new_hour", "gone", "samples")
    SEEK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    AUXILIARY_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_IS_SET_FIELD_NUMBER: _ClassVar[int]
    GRID_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEW_HOUR_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    seek: Seek
    weight: float
    bandwidth: float
    auxiliary: bool
    gathered: bytes
    bandwidth_is_set: bool
    grid_rounds: int
    new_hour: bool
    gone: int
    samples: int
    def __init__(self, seek: _Optional[_Union[Seek, _Mapping]] = ..., weight: _Optional[float] = ..., bandwidth: _Optional[float] = ..., auxiliary: _Optional[bool] = ..., gathered: _Optional[bytes] = ..., bandwidth_is_set: _Optional[bool] = ..., grid_rounds: _Optional[int] = ..., new_hour: _Optional[bool] = ..., gone: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class GroupMember(_message.Message):
    __slots__ = ("contact", "weight", "bandwidth", "auxiliary", "gathered", "bandwidth_is_set", "grid_rounds", "new_hour", "gone", "samples")
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    AUXILIARY_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_IS_SET_FIELD_NUMBER: _ClassVar[int]
    GRID_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEW_HOUR_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    contact: _peer_pb2.Contact
    weight: float
    bandwidth: float
    auxiliary: bool
    gathered: bytes
    bandwidth_is_set: bool
    grid_rounds: int
    new_hour: bool
    gone: int
    samples: int
    def __init__(self, contact: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., weight: _Optional[float] = ..., bandwidth: _Optional[float] = ..., auxiliary: _Optional[bool] = ..., gathered: _Optional[bytes] = ..., bandwidth_is_set: _Optional[bool] = ..., grid_rounds: _Optional[int] = ..., new_hour: _Optional[bool] = ..., gone: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group_id", "members", "codec")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    members: _containers.RepeatedCompositeFieldContainer[GroupMember]
    codec: str
    def __init__(self, group_id: _Optional[bytes] = ..., members: _Optional[_Iterable[_Union[GroupMember, _Mapping]]] = ..., codec: _Optional[str] = ...) -> None: ...

class Meet(_message.Message):
    __slots__ = ("run", "averager", "contact", "schema", "place", "round_key", "turn", "leaves")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AVERAGER_FIELD_NUMBER: _ClassVar[int]
    CONTACT_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ROUND_KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    run: str
    averager: str
    contact: _peer_pb2.Contact
    schema: bytes
    place: str
    round_key: str
    turn: int
    leaves: bool
    def __init__(self, run: _Optional[str] = ..., averager: _Optional[str] = ..., contact: _Optional[_Union[_peer_pb2.Contact, _Mapping]] = ..., schema: _Optional[bytes] = ..., place: _Optional[str] = ..., round_key: _Optional[str] = ..., turn: _Optional[int] = ..., leaves: _Optional[bool] = ...) -> None: ...

class MeetAnswer(_message.Message):
    __slots__ = ("mates", "home", "passed")
    MATES_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    mates: _containers.RepeatedCompositeFieldContainer[_peer_pb2.Contact]
    home: str
    passed: bool
    def __init__(self, mates: _Optional[_Iterable[_Union[_peer_pb2.Contact, _Mapping]]] = ..., home: _Optional[str] = ..., passed: _Optional[bool] = ...) -> None: ...

class JoinAnswer(_message.Message):
    __slots__ = ("group", "standing")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    group: Group
    standing: SeekAnswer
    def __init__(self, group: _Optional[_Union[Group, _Mapping]] = ..., standing: _Optional[_Union[SeekAnswer, _Mapping]] = ...) -> None: ...
