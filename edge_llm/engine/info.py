"""EngineInfo: what a loaded engine is, as plain values that can cross a process border."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A model and how it is loaded. It does not change while the engine lives."""

    name: str
    context: int
    """tokens that the model sees at once, and that a conversation may have unless it slides"""
    slots: int
    """conversations that are answered at the same time"""
    vocab: int
    """one more than the highest token id"""
    chats: bool
    """whether it has a chat template"""
    tokenizer_digest: str
    """of messages that carry the ids they were sampled as"""
    layout: str
    """which graph computes: ring or static"""
    kv_type: str
    """how keys and values are kept: int8 or f32"""
    parameters: int
    """numbers in its matrices"""
    weights_bytes: int
    provider: str = "cpu"
    """what computes: an execution provider of ONNX Runtime, and its device where that is not told by its name"""
    notice: str = ""
    """one sentence for the user about why it does not run as asked or as it usually does; empty: it does"""

    @property
    def chat_notice(self) -> str:
        """`notice`, and whether there is no talking to it."""
        cannot = "" if self.chats else f"{self.name} is a base model: it continues texts and cannot answer messages"
        return "; ".join(part for part in (cannot, self.notice) if part)
