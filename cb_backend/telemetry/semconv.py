"""Attribute names of traces and metrics: OpenTelemetry's for generative AI, and ours under `cb.`.

OpenTelemetry moved these conventions into a repository of their own (open-telemetry/semantic-conventions-genai; text of
commit 024a4f94, status "Development") and marks its Python constants as deprecated, so the names are written here once.
The `gen_ai.latency.*` keys are no convention yet: vLLM and SGLang both emit them (semantic-conventions-genai #408).
"""

from __future__ import annotations

PROVIDER = "cb_backend"

CHAT = "chat"
TEXT_COMPLETION = "text_completion"

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
OUTPUT_TYPE = "gen_ai.output.type"
ERROR_TYPE = "error.type"

REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_STOP_SEQUENCES = "gen_ai.request.stop_sequences"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"

RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"

USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"

LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TIME_IN_MODEL_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_TIME_IN_MODEL_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_TIME_IN_MODEL_INFERENCE = "gen_ai.latency.time_in_model_inference"

REQUEST_CLASS = "cb.request.class"
REQUEST_PRIORITY = "cb.request.priority"
PREEMPTIONS = "cb.preemptions"
RECOMPUTED_TOKENS = "cb.recomputed_tokens"
SWAPPED_BYTES = "cb.swapped_bytes"
CHOICE_INDEX = "cb.choice.index"
STEP = "cb.step"
TOKENS = "cb.tokens"
TOKENS_START = "cb.tokens.start"
CACHED_TOKENS = "cb.cached_tokens"
PREEMPTION_MODE = "cb.preemption.mode"
BLOCKS = "cb.kv.blocks"
BYTES = "cb.kv.bytes"

# Buckets that the conventions advise for the server metrics, seconds.
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TIME_PER_OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
