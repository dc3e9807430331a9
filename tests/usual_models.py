"""Fifty pydantic models as people write them for structured output: records, enums, nested and recursive ones, unions
with and without a discriminator, dates, limits, aliases, generics and sets."""

# ruff: noqa: UP007, UP045 - the older forms are written too
import datetime
import enum
import ipaddress
import pathlib
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar, Union

from pydantic import (
    UUID4,
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    HttpUrl,
    NonNegativeInt,
    PastDate,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
    Tag,
    TypeAdapter,
    confloat,
    conint,
    conlist,
    constr,
)  # fmt: skip
from typing_extensions import TypedDict

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Answer(BaseModel):
    answer: str


class Person(BaseModel):
    name: str
    age: int


class Address(BaseModel):
    street: str
    city: str
    postcode: str = Field(pattern=r"^\d{5}$")
    country: Literal["DE", "FR", "IT"] = "DE"


class Customer(BaseModel):
    """A customer with what belongs to it."""

    id: uuid.UUID
    person: Person
    addresses: list[Address] = Field(min_length=1, max_length=3)
    vip: bool = False


class Sentiment(BaseModel):
    label: Literal["positive", "negative", "neutral"]
    confidence: float = Field(ge=0, le=1)


class Classification(BaseModel):
    labels: list[Color] = Field(max_length=4)
    reason: Optional[str] = None


class Painted(BaseModel):
    color: Color
    level: Level


class Event(BaseModel):
    title: str = Field(max_length=40)
    start: datetime.datetime
    end: datetime.datetime | None = None
    day: datetime.date
    at: datetime.time
    lasts: datetime.timedelta


class Meeting(BaseModel):
    when: AwareDatetime
    born: PastDate
    attendees: list[str] = []


class Product(BaseModel):
    sku: constr(pattern=r"^[A-Z]{2}-\d{4}$")
    price: confloat(gt=0, lt=1000)
    stock: conint(ge=0, le=500)
    tags: conlist(str, max_length=3)


class Invoice(BaseModel):
    number: PositiveInt
    total: Decimal
    lines: list["Line"]


class Line(BaseModel):
    text: str
    count: NonNegativeInt
    price: Annotated[Decimal, Field(ge=0, le=10000)]


class Tree(BaseModel):
    value: int
    children: list["Tree"] = Field(default=[], max_length=2)


class Chain(BaseModel):
    name: str
    next: Optional["Chain"] = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    breed: str


class Lizard(BaseModel):
    kind: Literal["reptile", "lizard"]
    scales: bool


class Pet(BaseModel):
    pet: Cat | Dog


class Owner(BaseModel):
    pet: Union[Cat, Dog, Lizard] = Field(discriminator="kind")
    age: int


class Zoo(BaseModel):
    animals: list[Annotated[Union[Cat, Lizard], Field(discriminator="kind")]] = Field(max_length=3)


Animal = Annotated[Union[Annotated[Union[Cat, Lizard], Field(discriminator="kind")], Dog], Field(discriminator="kind")]


class Nested(BaseModel):
    animal: Animal


def _tag(value: Any) -> str:
    return "text" if isinstance(value, str) else "number"


class Tagged(BaseModel):
    value: Annotated[Union[Annotated[str, Tag("text")], Annotated[int, Tag("number")]], Discriminator(_tag)]


class Search(BaseModel):
    action: Literal["search"]
    query: str
    limit: int = Field(default=10, ge=1, le=100)


class Click(BaseModel):
    action: Literal["click"]
    x: int
    y: int


class Finish(BaseModel):
    action: Literal["finish"]
    result: str | None


class Step(BaseModel):
    thought: str
    action: Search | Click | Finish = Field(discriminator="action")


class Plan(BaseModel):
    steps: list[Step] = Field(min_length=1, max_length=3)


class Recipe(BaseModel):
    name: str
    ingredients: dict[str, str]
    minutes: int


class Counts(BaseModel):
    words: dict[str, int]


class Page(BaseModel, Generic[T]):
    items: list[T] = Field(max_length=2)
    total: int


class Point(NamedTuple):
    x: float
    y: float


class Shape(BaseModel):
    points: list[tuple[float, float]] = Field(max_length=3)
    origin: Point
    box: tuple[int, int, int, int]


class Movie(TypedDict):
    title: str
    year: int


class Library(BaseModel):
    movies: list[Movie] = Field(max_length=2)


@dataclass
class Record:
    name: str
    value: float | None = None


class Contact(BaseModel):
    site: HttpUrl | None
    homepage: AnyUrl
    host: ipaddress.IPv4Address
    host6: ipaddress.IPv6Address
    token: UUID4


class Account(BaseModel):
    user: Annotated[str, StringConstraints(min_length=3, max_length=12, pattern=r"^[a-z_]+$")]
    password: SecretStr
    home: pathlib.Path


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    first_name: str = Field(alias="firstName")
    last_name: str = Field(alias="lastName")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Described(BaseModel):
    """With texts for the model that reads the schema."""

    summary: str = Field(description="One sentence.", examples=["It rains."])
    score: int = Field(title="Score", ge=0, le=10, deprecated=True)


class Maybe(BaseModel):
    found: bool
    value: Person | None = None


class Numbers(BaseModel):
    even: int = Field(multiple_of=2)
    half: float = Field(multiple_of=0.5)
    range: float = Field(gt=-1, le=2.5)


class Mixed(BaseModel):
    value: int | str | bool | None
    values: list[int | str] = Field(max_length=3)


class Matrix(BaseModel):
    rows: list[list[float]] = Field(max_length=3)


class Flags(BaseModel):
    colors: set[Color]
    levels: frozenset[Level] = Field(min_length=1)


class Quiz(BaseModel):
    question: str
    options: list[str] = Field(min_length=2, max_length=4)
    correct: Literal[0, 1, 2, 3]


class Citation(BaseModel):
    source: str
    page: int | None = Field(default=None, ge=1)


class Cited(BaseModel):
    text: str
    citations: list[Citation] = Field(default_factory=list, max_length=2)


class Extraction(BaseModel):
    entities: list["Entity"] = Field(max_length=3)


class Entity(BaseModel):
    text: str
    type: Literal["PER", "ORG", "LOC"]
    start: int = Field(ge=0)


class Free(BaseModel):
    data: dict[str, Any]
    anything: Any = None


class Unicode(BaseModel):
    größe: int
    名前: str = Field(alias='na"me\\')


class Patched(BaseModel):
    op: Literal["add", "remove"]
    path: str = Field(pattern=r"^(/\w+)+$")


Names = RootModel[list[str]]
Codes = RootModel[Annotated[str, Field(pattern=r"^[A-F0-9]{8}$")]]

MODELS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Answer, Person, Address, Customer, Sentiment, Classification, Painted, Event, Meeting, Product, Invoice, Tree,
        Chain, Pet, Owner, Zoo, Nested, Tagged, Step, Plan, Recipe, Counts, Shape, Library, Contact, Account, Aliased,
        Strict, Open, Described, Maybe, Numbers, Mixed, Matrix, Flags, Quiz, Cited, Extraction, Free, Unicode, Patched,
        Page[Person],
        Page[Color], Names, Codes, Record, Movie, Point, Color,
    )
} | {"list[Person]": TypeAdapter(list[Person])}  # fmt: skip
