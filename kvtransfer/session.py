"""The two halves of a handoff as pure state machines."""

from kvtransfer.session.causes import HandoffCause, HandoffFault
from kvtransfer.session.receive import ReceiveSession, ReceiveState
from kvtransfer.session.send import SendSession, SendState

__all__ = ["HandoffCause", "HandoffFault", "ReceiveSession", "ReceiveState", "SendSession", "SendState"]
