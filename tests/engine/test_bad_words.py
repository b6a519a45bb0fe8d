"""What is kept of banned words is bounded by its characters, and the lists used last are kept."""

from __future__ import annotations

from cb_backend.engine.bad_words import BadWords


class Letters:
    """A tokenizer of one id per character that counts what it is asked."""

    def __init__(self):
        self.asked = []

    def encode(self, text, add_special_tokens):
        self.asked.append(text)
        return [ord(c) for c in text]


def test_words_are_spelt_at_the_beginning_and_after_a_space():
    assert BadWords(Letters()).ids(("a", " a")) == ((97,), (32, 97))
    assert BadWords(None).ids(("a",)) == BadWords(Letters()).ids(()) == ()


def test_big_lists_do_not_stay():
    words = BadWords(Letters(), max_characters=10_000)
    for i in range(100):
        words.ids((f"{i:04}" * 250,))
        assert words.num_characters <= 10_000
    assert 1 <= len(words) <= 10
    words.ids(("x" * 20_000,))
    assert words.num_characters <= 10_000


def test_many_short_words_count_more_than_their_characters():
    words = BadWords(Letters(), max_characters=1000)
    for i in range(1000):
        words.ids((chr(200 + i),))
    assert len(words) < 100


def test_the_lists_used_last_are_kept():
    letters = Letters()
    words = BadWords(letters, max_characters=300)
    words.ids(("a" * 84,)), words.ids(("b" * 84,)), words.ids(("a" * 84,))
    words.ids(("c" * 84,)), words.ids(("d" * 84,))  # 100 each: the fourth drops b
    asked = len(letters.asked)
    words.ids(("a" * 84,))
    assert len(letters.asked) == asked
    words.ids(("b" * 84,))
    assert len(letters.asked) == asked + 2
