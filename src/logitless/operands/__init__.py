"""Operands of a verb besides rows: logits, an adapter on their head, a teacher, ids that a sampler kept."""

from logitless.operands import passed_on as passed_on
from logitless.operands.kept import Kept
from logitless.operands.logits import Given, Linear, Logits, LogitsMade, shard_of
from logitless.operands.lora import LoRA
from logitless.operands.teacher import Teacher, Teachers, TopK

__all__ = ["Given", "Kept", "Linear", "LoRA", "Logits", "LogitsMade", "Teacher", "Teachers", "TopK", "shard_of"]
