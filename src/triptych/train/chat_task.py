"""Conversations in a checkpoint's chat template, trained on the assistant's turns alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from triptych.errors import InputError, TextError, shown
from triptych.nn import Transformer
from triptych.text import ChatTemplate, Tokenizer
from .evaluate import HeldOut
from .objectives import Example
from .recipe import Recipe
from .records import DataRecord
from .task import ObjectiveTask, Prepared, epoch_rows, read_split

Message = Mapping[str, object]
Span = tuple[int, int]


class ChatTask(ObjectiveTask):
    """Field `messages`: a list of `{"role": ..., "content": ...}`, at least one of them the assistant's."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        sides = read_split(recipe.data, ("messages",))
        self.train, self.held_out = ([(record, _messages(record)) for record in side] for side in sides)
        self.texts = [str(message["content"]) for _, messages in self.train for message in messages]

    def data(self, module: Transformer, tokens: int) -> Prepared:
        tokenizer, template = self.tokenizer, self.tokenizer.chat
        if template is None:
            raise TextError("objective chat needs a tokenizer with a chat template; give a chat model as model.path")

        def rows(record: DataRecord, messages: Sequence[Message]) -> Iterator[Example]:
            try:
                texts = assistant_spans(template, messages)
            except (TextError, InputError) as error:
                raise InputError(f"{record.location}: {error}") from None
            for text, spans in texts:
                row = chat_example(text, spans, tokenizer)
                length = self.row_length(record, len(row.ids))
                if length is not None and row.trained[:length].any():
                    yield Example(row.ids[:length], row.targets[:length], row.trained[:length])

        data, held_out = (epoch_rows(row for one in side for row in rows(*one)) for side in (self.train, self.held_out))
        trained = np.concatenate([row.targets[row.trained] for row in data.examples])
        if not np.isin(trained, sorted(tokenizer.stop_ids)).any():
            raise InputError(
                "the chat template ends no assistant's turn with a token at which generation stops, so that a trained "
                "model would never stop; use a template that writes one"
            )
        return data, HeldOut.of(held_out, data, tokens, device=self.device)


def assistant_spans(template: ChatTemplate, messages: Sequence[Message]) -> list[tuple[str, list[Span]]]:
    """Rendered conversations, and in each the characters that are the assistant's.

    A turn begins where the template, asked for the next turn after the messages before it, ends, and ends where the
    template ends with it as the last message; its content is never searched for.  Where the template writes earlier
    turns otherwise once others follow them (some leave out their reasoning), each turn has a text of its own, with the
    messages before it.  Raises InputError for a template that does not write a turn as it asks for one.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = template.render(messages, add_generation_prompt=False).text
    texts, spans, nested = [], [], True
    for turn in turns:
        before = template.render(messages[:turn], add_generation_prompt=True).text
        after = template.render(messages[: turn + 1], add_generation_prompt=False).text
        if not after.startswith(before):
            raise InputError(
                f"the chat template begins the assistant's turn {turn + 1} with other text than a prompt for it ends "
                "with, so the place where the answer begins is unknown; use another template"
            )
        nested = nested and whole.startswith(after)
        spans.append((len(before), len(after)))
        texts.append(after)
    return [(whole, spans)] if nested else [(text, [span]) for text, span in zip(texts, spans, strict=True)]


def chat_example(text: str, spans: Iterable[Span], tokenizer: Tokenizer) -> Example:
    """The row of a rendered conversation, each token of `spans` predicted from all those before it.

    White space after the token that ends a turn is the template's and is not trained.
    """
    row = tokenizer.backend.encode(text, add_special_tokens=False)
    ids, trained = np.asarray(row.ids, dtype=np.int32), np.zeros(len(row.ids), dtype=bool)
    for start, stop in spans:
        inside = [i for i, (a, b) in enumerate(row.offsets) if a >= start and b <= stop and b > a]
        ends = [i for i in inside if row.ids[i] in tokenizer.stop_ids]
        if ends and not text[row.offsets[ends[-1]][1] : stop].strip():
            inside = [i for i in inside if i <= ends[-1]]
        trained[inside] = True
    return Example(ids[:-1], ids[1:], trained[1:])


def messages_of(record: DataRecord, field: str) -> list[Message]:
    """The messages in a field of a record.  Raises TextError for anything else."""
    value = record.values[field]
    if not isinstance(value, list) or not value:
        raise record.error(f'{field} is {shown(value)}, not a list of {{"role": ..., "content": ...}}')
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise record.error(f"a message is {shown(message)}; give its role and its content as texts")
    return value


def _messages(record: DataRecord) -> list[Message]:
    messages = messages_of(record, "messages")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise record.error(f"no message is the assistant's, so there is nothing to learn; roles are {shown(roles)}")
    if roles[0] == "assistant":
        raise record.error("the first message is the assistant's, with nothing before it to answer")
    return messages
