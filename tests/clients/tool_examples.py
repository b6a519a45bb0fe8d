"""Examples of when and how to call a tool, which teach the demo model to call by itself (tests/clients/tool_caller.py).

None is about the tools or the questions of a test: what the tests see of the model must come from reading the tools of
a request. Each chat has one tool: to choose among several is more than these few examples teach.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CALL_ID = "call_1"

# Name -> what it does, and the types of its parameters.
_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "convert_currency": ("Convert an amount of money.", {"amount": "number", "source": "string", "target": "string"}),
    "translate": ("Translate a text into another language.", {"text": "string", "language": "string"}),
    "lookup_word": ("Look up a word in the dictionary.", {"word": "string"}),
    "local_time": ("Get the current time in a city.", {"city": "string"}),
    "set_timer": ("Start a timer.", {"minutes": "integer"}),
    "send_message": ("Send a message to a person.", {"person": "string", "message": "string"}),
    "play_song": ("Play a song.", {"title": "string"}),
    "stock_price": ("Get the price of a share.", {"symbol": "string"}),
    "track_parcel": ("Find out where a parcel is.", {"number": "string"}),
    "find_restaurants": ("Find restaurants near a place.", {"place": "string", "food": "string"}),
    "route_length": ("Get the distance by road between two places.", {"start": "string", "end": "string"}),
    "book_info": ("Get the author and the year of a book.", {"title": "string"}),
    "switch_light": ("Switch the light in a room on or off.", {"room": "string", "on": "boolean"}),
    "calculate": ("Calculate an arithmetic expression.", {"expression": "string"}),
    "population": ("Get the number of people who live in a country.", {"country": "string"}),
    "flight_status": ("Get the status of a flight.", {"flight": "string"}),
    "read_news": ("Get the latest news about a topic.", {"topic": "string"}),
    "air_quality": ("Get the air quality at an address.", {"address": "string"}),
    "user_email": ("Get the email address of a user.", {"name": "string"}),
    "add_event": ("Add an event to the calendar.", {"title": "string", "day": "string"}),
}

# A question that needs a tool, the tool, and the arguments.
_CALLS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "How much is 50 dollars in euros?",
        "convert_currency",
        {"amount": 50, "source": "dollars", "target": "euros"},
    ),
    (
        "Please convert 1200 yen to pounds.",
        "convert_currency",
        {"amount": 1200, "source": "yen", "target": "pounds"},
    ),
    ("How do you say good morning in Italian?", "translate", {"text": "good morning", "language": "Italian"}),
    ("Translate the word bread into Polish.", "translate", {"text": "bread", "language": "Polish"}),
    ("What does the word ephemeral mean?", "lookup_word", {"word": "ephemeral"}),
    ("What time is it in Tokyo?", "local_time", {"city": "Tokyo"}),
    ("Tell me the time in Buenos Aires, please.", "local_time", {"city": "Buenos Aires"}),
    ("What is the time in Denver, CO?", "local_time", {"city": "Denver, CO"}),
    ("Set a timer for 12 minutes.", "set_timer", {"minutes": 12}),
    ("Wake me up in 45 minutes.", "set_timer", {"minutes": 45}),
    (
        "Tell Maria that I will be late.",
        "send_message",
        {"person": "Maria", "message": "I will be late."},
    ),
    (
        "Send Tom a message: dinner is ready.",
        "send_message",
        {"person": "Tom", "message": "Dinner is ready."},
    ),
    ("Play Yesterday.", "play_song", {"title": "Yesterday"}),
    ("What is the price of AAPL?", "stock_price", {"symbol": "AAPL"}),
    ("Where is my parcel 88213?", "track_parcel", {"number": "88213"}),
    ("Has parcel ZX-410 arrived?", "track_parcel", {"number": "ZX-410"}),
    (
        "Where can I eat sushi near the main station?",
        "find_restaurants",
        {"place": "main station", "food": "sushi"},
    ),
    ("Find a pizza place in Naples.", "find_restaurants", {"place": "Naples", "food": "pizza"}),
    ("How far is it from Madrid to Seville?", "route_length", {"start": "Madrid", "end": "Seville"}),
    ("How long is the road from Oslo to Bergen?", "route_length", {"start": "Oslo", "end": "Bergen"}),
    ("Who wrote The Old Man and the Sea?", "book_info", {"title": "The Old Man and the Sea"}),
    ("When was Dracula published?", "book_info", {"title": "Dracula"}),
    ("Turn on the light in the kitchen.", "switch_light", {"room": "kitchen", "on": True}),
    ("What is 37 times 12?", "calculate", {"expression": "37 * 12"}),
    ("Add 118 and 2094.", "calculate", {"expression": "118 + 2094"}),
    ("How many people live in Portugal?", "population", {"country": "Portugal"}),
    ("What is the population of New Zealand?", "population", {"country": "New Zealand"}),
    ("Is flight LH 402 on time?", "flight_status", {"flight": "LH 402"}),
    ("What is the status of flight BA117?", "flight_status", {"flight": "BA117"}),
    ("What is new in astronomy?", "read_news", {"topic": "astronomy"}),
    ("What is the air quality at 12 Hill Road, Leeds?", "air_quality", {"address": "12 Hill Road, Leeds"}),
    ("How good is the air at 5 Park Lane?", "air_quality", {"address": "5 Park Lane"}),
    ("What is the email address of Anna Berg?", "user_email", {"name": "Anna Berg"}),
    ("How can I reach John Miller by email?", "user_email", {"name": "John Miller"}),
    ("Put the dentist into my calendar on Friday.", "add_event", {"title": "dentist", "day": "Friday"}),
]

# Of the first question of a tool: what the tool says, and what the model makes of it.
_RESULTS: dict[str, tuple[str, str]] = {
    "convert_currency": ("46.20", "50 dollars are 46.20 euros."),
    "lookup_word": ("lasting for a very short time", "The word ephemeral means lasting for a very short time."),
    "local_time": ("21:40", "It is 21:40 in Tokyo."),
    "set_timer": ("ok", "The timer is set for 12 minutes."),
    "stock_price": ("$231.50", "The price of AAPL is $231.50."),
    "track_parcel": ("Out for delivery.", "Your parcel 88213 is out for delivery."),
    "route_length": ("531 km", "It is 531 km from Madrid to Seville."),
    "book_info": ("Ernest Hemingway, 1952", "Ernest Hemingway wrote The Old Man and the Sea in 1952."),
    "calculate": ("444", "37 times 12 is 444."),
    "flight_status": ("It's delayed.", "Flight LH 402 is delayed."),
    "air_quality": ("Good.", "The air quality at 12 Hill Road, Leeds is good."),
    "user_email": ("anna@example.com", "The email address of Anna Berg is anna@example.com."),
}

# No tool helps with these.
_PLAIN: list[tuple[str, str]] = [
    ("Hello!", "Hello! How can I help you today?"),
    ("Thank you very much.", "You're welcome!"),
    ("Write a short sentence about a dog.", "The dog ran happily through the park."),
    ("Who are you?", "I am SmolLM, a helpful AI assistant."),
    ("What colour is the sky on a clear day?", "The sky is blue on a clear day."),
    ("How are you?", "I'm doing well, thank you. How can I help you?"),
    ("Name three fruits.", "Three fruits are apples, bananas and oranges."),
    ("What do bees make?", "Bees make honey."),
    ("Goodbye.", "Goodbye! Have a nice day."),
    ("Give me a tip for sleeping better.", "Go to bed at the same time every day."),
    ("Write a line of a poem about the sea.", "The sea sings softly to the sleeping shore."),
    ("Tell me a riddle.", "What has hands but cannot clap? A clock."),
    ("What is the opposite of big?", "The opposite of big is small."),
    ("Why do birds fly south?", "Birds fly south to find warmth and food in the winter."),
    ("Explain what a poem is.", "A poem is a text that uses sound and rhythm to say something."),
    ("I like to read.", "That's nice! Reading is a wonderful hobby."),
]


@dataclass(frozen=True, slots=True)
class Example:
    """A chat request with tools, and the message that is the right answer."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    answer: dict[str, Any]


def examples() -> list[Example]:
    """All of them: calls, answers to what a tool said, and answers without a tool."""
    made = []
    heard = set()
    for question, name, arguments in _CALLS:
        asked, call = [{"role": "user", "content": question}], _call(name, arguments)
        made.append(Example([_tool(name)], asked, call))
        if name in _RESULTS and name not in heard:
            heard.add(name)
            result, answer = _RESULTS[name]
            chat = [*asked, call, {"role": "tool", "tool_call_id": CALL_ID, "content": result}]
            made.append(Example([_tool(name)], chat, _said(answer)))
    for (question, answer), name in zip(_PLAIN, _TOOLS, strict=False):
        made.append(Example([_tool(name)], [{"role": "user", "content": question}], _said(answer)))
    return made


def _tool(name: str) -> dict[str, Any]:
    description, types = _TOOLS[name]
    parameters = {
        "properties": {key: {"type": kind} for key, kind in types.items()},
        "required": list(types),
        "type": "object",
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
    }
