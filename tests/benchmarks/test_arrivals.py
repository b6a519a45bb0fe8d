"""Which requests a serving benchmark sends, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.benchmarks.arrivals import Job, from_trace, poisson, together

REQUESTS = [
    {"prompt_token_ids": [1, 2, 3], "max_tokens": 5},
    {"prompt_token_ids": [4, 5], "max_tokens": 6},
]


def trace(folder: Path, *rows: str, header: str = "arrival_s,prompt_tokens,output_tokens") -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def test_a_workload_comes_at_once_and_is_repeated_up_to_the_number_asked_for():
    assert together(REQUESTS, 3) == [Job((1, 2, 3), 5), Job((4, 5), 6), Job((1, 2, 3), 5)]


def test_poisson_arrivals_have_the_rate_and_the_spread_of_exponential_gaps():
    jobs = poisson(REQUESTS, rate=4.0, number=4001, seed=1)
    gaps = [b.at - a.at for a, b in zip(jobs, jobs[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert jobs[0].at == 0.0
    assert mean == pytest.approx(0.25, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_the_same_seed_gives_the_same_arrivals_and_another_seed_others():
    assert poisson(REQUESTS, 4.0, seed=1) == poisson(REQUESTS, 4.0, seed=1)
    assert poisson(REQUESTS, 4.0, seed=1) != poisson(REQUESTS, 4.0, seed=2)


def test_a_trace_gives_times_and_scaled_lengths_and_the_workload_the_ids(tmp_path):
    path = trace(tmp_path, "10.0,8,40", "10.5,16,1", "12.0,4,20")
    jobs = from_trace(path, REQUESTS, prompt_scale=4, output_scale=10)
    assert [job.at for job in jobs] == [0.0, 0.5, 2.0]
    assert [len(job.prompt) for job in jobs] == [2, 4, 1]
    assert [job.max_tokens for job in jobs] == [4, 1, 2]
    ids = "12345"
    assert all("".join(map(str, job.prompt)) in ids for job in jobs)


def test_a_rate_stretches_a_traces_time_and_keeps_its_bursts(tmp_path):
    jobs = from_trace(trace(tmp_path, "0,1,1", "0,1,1", "1,1,1"), REQUESTS, rate=0.5)
    assert [job.at for job in jobs] == [0.0, 0.0, 4.0]


def test_a_traces_longest_requests_are_cut_to_what_the_model_holds(tmp_path):
    [job] = from_trace(trace(tmp_path, "0,9000,9000"), REQUESTS, most_tokens=6)
    assert (len(job.prompt), job.max_tokens) == (3, 3)


@pytest.mark.parametrize(
    "rows, header, message",
    [
        (["0,1"], "arrival_s,prompt_tokens", "has no column 'output_tokens'"),
        ([], "arrival_s,prompt_tokens,output_tokens", "needs at least one row"),
        (["2,1,1", "1,1,1"], "arrival_s,prompt_tokens,output_tokens", "in the order of arrival_s"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused(tmp_path, rows, header, message):
    with pytest.raises(ValueError, match=message):
        from_trace(trace(tmp_path, *rows, header=header), REQUESTS)
