"""The codecs in which the tensors of an expert's calls are sent."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from swarm.compression import find


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCodecs:
    """The codecs in which the tensors of a call are sent. None: the codec that the expert's server names, or
    no encoding where it names none; "float32" always sends float32 tensors unencoded.
    """

    inputs: str | None = None  # activations sent to the expert
    outputs: str | None = None  # activations returned by the expert
    gradients: str | None = None  # gradients of the outputs, sent to the expert
    input_gradients: str | None = None  # gradients of the inputs, returned by the expert

    def __post_init__(self) -> None:
        for name in self.names:
            if name is not None:
                find(name)

    @property
    def names(self) -> tuple[str | None, ...]:
        """Return the names in the order of the fields."""
        return astuple(self)

    def or_else(self, defaults: WireCodecs) -> WireCodecs:
        """Return these codecs, and those of `defaults` where there is none."""
        if defaults is UNCOMPRESSED:
            return self
        return WireCodecs(
            inputs=self.inputs or defaults.inputs,
            outputs=self.outputs or defaults.outputs,
            gradients=self.gradients or defaults.gradients,
            input_gradients=self.input_gradients or defaults.input_gradients,
        )


UNCOMPRESSED = WireCodecs()
