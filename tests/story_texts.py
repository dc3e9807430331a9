"""What tests of the story share: a short text to train on, another to be measured on, and a loss that steps print."""

import random

from triptych_lectures import story


def chain(letters: str, length: int, seed: int) -> str:
    """Text in which each letter is followed by one of three others, so that counts of pairs know something."""
    noise = random.Random(seed)
    follow = {letter: noise.choices(letters, k=3) for letter in letters}
    text = [letters[0]]
    while len(text) < length:
        text.append(noise.choice(follow[text[-1]]))
    return "".join(text)


TEXT = chain("\n aeiounrst", 1 << 14, 0)
HELD_OUT = TEXT[-(1 << 11) :]


def training_loss(done: story.StepRun) -> float:
    return float(next(line for line in done.lines if line.startswith("loss on the training")).split()[-1])
