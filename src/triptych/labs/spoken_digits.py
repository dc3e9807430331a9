"""Does a model in the shape of Whisper, trained from nothing, write down digits spoken by voices that it never heard?
(Lectures L1 and L4: an encoder reads another kind of input, and cross-attention joins it to the text.)

The claim is false if fewer than 95% of the words are right for voices, speeds and pitches that training did not have,
or if a model trained on the same sounds with their transcripts shuffled does as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.labs.lab import Check, LabResult, Setup, size
from triptych.labs.small import Points, fit
from triptych.media import audio
from triptych.media.spoken_digits import (
    DIGITS,
    HEARD,
    UNHEARD,
    Clips,
    Recorder,
    Recording,
    SpokenWords,
)
from triptych.model import Model, create
from triptych.page import AttentionMap, AttentionSection, Curve, Section, TableSection
from triptych.text import SPEECH, Tokenizer, WhisperTokens, with_whisper_tokens, word_tokenizer
from triptych.train import Data, Example, OptimizerSettings, Schedule
from triptych.train.audio_records import Speech
from triptych.train.data import random_numbers
from triptych.train.metrics import word_error_rate
from triptych.train.objectives import Ids

FALSIFIED_BY = (
    "The claim is false if fewer than 95% of the words are right for voices, speeds and pitches that training did not"
    " have. It is also false if a model that was trained on the same sounds with their transcripts shuffled does as"
    " well."
)
RIGHT = 0.95  # of the words, by the claim
MARGIN = 0.1  # seconds around a word in which attention to it may lie: ten frames, four times the window of one
