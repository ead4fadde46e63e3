"""The numbers that host code and kernels agree on: sizes, and the fields of the int64 records they share. Imports nothing.

Every record is a one-dimensional int64 array; an `IntEnum` names its fields. Addresses are plain integers.
"""

from __future__ import annotations

from enum import IntEnum

# --- sizes -----------------------------------------------------------------------------------------------------------

TILE = 64
"""rows of the KV cache a tile; capacities, sinks and prefix blocks are multiples of it"""
SPLIT = 256
"""rows of one attention split: partial results are merged at absolute multiples of it, whatever the threads or chunks"""
GROUP_ROWS = 16
"""output rows of a weight matrix that are interleaved"""
ACTIVATION_BLOCK = 32
"""inputs that share one int8 scale when activations are quantised"""
UNBOUNDED = 1 << 40
"""a window no position reaches"""
MAX_POSITION = 1 << 30
"""positions of a conversation that slides: segments carry them as int32"""


class KvType(IntEnum):
    """How keys and values are stored."""

    F32 = 0
    INT8 = 1


# --- cache descriptor: owned by KVCache, read by RingAttention ---------------------------------------------------------

CACHE_MAGIC = 0x0065_6467_656B_7601
CACHE_VERSION = 2


class Cache(IntEnum):
    """Header of the cache descriptor; `LAYER_FIELDS` int64 a layer follow from `FIRST_LAYER` on."""

    MAGIC = 0
    VERSION = 1
    GENERATION = 2
    LAYERS = 3
    SLOTS = 4
    LENGTHS = 5
    """address of int64 [slots]: committed rows of each slot"""
    LIMIT = 6
    """positions a slot may reach: the context, or MAX_POSITION where the cache slides; RingAttention refuses rows beyond it"""
    WRITTEN = 7
    """address of int64 [slots]: rows that steps have reached in each slot, committed or not. RingAttention raises it; the
    ring holds no row of a position below WRITTEN minus its size"""
    FIRST_LAYER = 16


class CacheLayer(IntEnum):
    """Fields of one layer in the cache descriptor.

    A (slot, kv head) owns `capacity` rows. The physical tile of position tile t is t while t < sinks / TILE, else
    sinks / TILE + (t - sinks / TILE) mod ((capacity - sinks) / TILE): tiles of positions are never split.

    keys    int8: uint8 [slots][kv_heads][capacity / TILE][head_dim / 4][TILE][4], the code plus 128
            f32:  float32 [slots][kv_heads][capacity / TILE][head_dim][TILE]
    values  int8: int8 [slots][kv_heads][capacity / TILE][TILE / 4][head_dim][4], the code; rows r, r + 16, r + 32 and
                  r + 48 of a tile lie side by side, for the weighted sum is a product of bytes like the scores
            f32:  float32 [slots][kv_heads][capacity][head_dim]
    scales  float32 [slots][kv_heads][capacity] (int8 only; key = (code - 128) * scale)
    """

    KEYS = 0
    VALUES = 1
    KEY_SCALES = 2
    VALUE_SCALES = 3
    CAPACITY = 4
    SINKS = 5
    WINDOW = 6
    """row p attends to k < sinks and to p - window < k <= p; UNBOUNDED for a global layer that does not slide.

    A global layer that slides has sinks + window = the context, so that a conversation below it attends to everything.
    """
    KV_HEADS = 7
    HEAD_DIM = 8
    KV_TYPE = 9


LAYER_FIELDS = 16


# --- one call of a kernel ----------------------------------------------------------------------------------------------


class LinearCall(IntEnum):
    """What `linear` kernels need: out[rows, outputs] = x[rows, inputs] @ weights.T (+ bias)."""

    X = 0
    """float32 [rows, inputs]"""
    OUT = 1
    """float32 [rows, outputs]"""
    ROWS = 2
    INPUTS = 3
    """K, a multiple of 32"""
    OUTPUTS = 4
    """N; the weights are padded to a multiple of GROUP_ROWS"""
    BITS = 5
    BLOCK = 6
    HAS_MINIMUM = 7
    CODES = 8
    SCALES = 9
    BIAS = 10
    """float32 [outputs], or 0"""
    X_BLOCKS = 11
    """64-byte aligned scratch of `quantised_bytes(rows, inputs)`: the rows of x as `linear_quantise` leaves them"""
    THREADS = 14
    """threads that may share the work: decides only how it is cut, never the arithmetic"""
    TASKS = 15
    """set by plan: number of tasks; the fields after PARTS belong to the kernel"""
    PARTS = 16
    """set by plan: `linear_quantise` has so many items for each row"""
    PRIVATE = 17


ROW_TILE = 24
"""rows of quantised activations that lie together, and that one pass over a group's weights serves"""
RECORD_WORDS = 12
"""int32 words of a quantised block of one row: 32 codes, scale, -1.5 * 2^23 * scale, one term a weight block (see `linear`)"""


ROW_PART = 384
"""elements of a row that are worth a thread of their own, where few rows leave threads idle"""
_CUT_ROWS = 4


def row_parts(rows: int, width: int) -> int:
    """In how many parts each row is quantised, and activated before it."""
    return max(1, width // ROW_PART) if rows <= _CUT_ROWS else 1


def quantised_bytes(rows: int, inputs: int) -> int:
    """Bytes of `rows` quantised rows: [rows / ROW_TILE][inputs / 32][ROW_TILE][RECORD_WORDS] int32."""
    return -(-rows // ROW_TILE) * ROW_TILE * (inputs // ACTIVATION_BLOCK) * RECORD_WORDS * 4


class EmbeddingCall(IntEnum):
    """What `embedding_row` needs: out[row] = scale * weights[ids[row]], from a matrix stored as LinearCall's."""

    IDS = 0
    """int64 [rows], each in [0, OUTPUTS): the caller checks"""
    OUT = 1
    """float32 [rows, inputs]"""
    ROWS = 2
    INPUTS = 3
    OUTPUTS = 4
    BITS = 5
    BLOCK = 6
    HAS_MINIMUM = 7
    CODES = 8
    SCALES = 9
    SCALE = 10
    """float64 bits"""


class NormCall(IntEnum):
    """What `norm_row` and `add_norm_row` need; groups of `group` elements are normed apart. Buffers must not overlap."""

    X = 0
    """float32 [rows, width]: x, or the residual"""
    DELTA = 1
    """add_norm_row only: float32 [rows, width], added to X"""
    GAMMA = 2
    """float32 [group]"""
    OUT = 3
    """float32 [rows, width]"""
    SUM = 4
    """add_norm_row only: float32 [rows, width], X + DELTA"""
    ROWS = 5
    WIDTH = 6
    GROUP = 7
    """divides WIDTH"""
    EPS = 8
    """float64 bits"""


class ActivationCall(IntEnum):
    """What `activation_part` needs: out[row] = f(gate) * up. Buffers must not overlap."""

    X = 0
    """float32 [rows, 2 * width]: gate, then up"""
    OUT = 1
    """float32 [rows, width]"""
    ROWS = 2
    WIDTH = 3
    KIND = 4
    """an `Activation`"""
    PARTS = 5
    """items for each row"""


class AttentionCall(IntEnum):
    """What `attention` kernels need: out[rows, heads * head_dim] from qkv of one ragged step."""

    QKV = 0
    """float32 [rows, (heads + 2 * kv_heads) * head_dim]: queries, keys, values"""
    OUT = 1
    """float32 [rows, heads * head_dim]"""
    ROWS = 2
    SEGMENTS = 3
    """int32 [segments, 4]: slot, first row, rows, position of the first row"""
    SEGMENT_COUNT = 4
    ROPE = 5
    """float32 [rows, rotary_dim] of this layer's table: rotary_dim / 2 cosines, then as many sines; 0: no rotation"""
    ROTARY_DIM = 6
    LAYER = 7
    """address of this layer's CacheLayer record"""
    HEADS = 8
    KV_HEADS = 9
    HEAD_DIM = 10
    Q_NORM = 11
    """float32 [head_dim] gamma of the RMS norm of each query head, or 0"""
    K_NORM = 12
    SCALE = 13
    """float64 bits: multiplies q . k"""
    SOFTCAP = 14
    """float64 bits: scores become softcap * tanh(scores / softcap); 0: off"""
    EPS = 15
    """float64 bits, of q_norm and k_norm"""
    SCRATCH = 16
    """64-byte aligned scratch of SCRATCH_BYTES"""
    SCRATCH_BYTES = 17
    THREADS = 18
    TASKS = 19
    """set by plan: number of attention tasks"""
    MERGES = 20
    """set by plan: number of merge tasks after them (0: the tasks wrote `out` themselves)"""
    SINK_ROPE = 21
    """as ROPE, for scores against sink rows of a slot that slides; 0: none"""
    SEGMENT_RECORDS = 22
    """ROWS records of SEGMENT_RECORD_BYTES, of this call alone: plan fills them"""
    PRIVATE = 24


SEGMENT_RECORD_BYTES = 64


ATTENTION_MAX_TASKS = 64
"""most tasks of an `attention` call: each has working memory of its own"""
_PART_ROWS = 8  # rows whose splits may be tasks of their own; where there are more, rows alone are work enough


def attention_offsets(rows: int, heads: int, head_dim: int) -> tuple[int, int, int, int, int]:
    """Where the parts of AttentionCall's scratch begin, for a step of `rows` rows; multiples of 64.

    (queries, their scales, queries against sinks, running states, working memory of the tasks)
    """
    vectors = (rows * heads + 7) // 8 * 8
    scales = vectors * 4 * head_dim
    sinks = scales + vectors * 16
    states = sinks + vectors * 4 * head_dim
    return 0, scales, sinks, states, states + vectors * 8


def attention_task_bytes(head_dim: int) -> int:
    """Working memory of one task: scores, codes and outputs of four vectors and one split, and 384 bytes of records."""
    return 4 * (4 * SPLIT + 2 * SPLIT + 4 * head_dim) + 384


def attention_scratch_bytes(*, max_rows: int, heads: int, head_dim: int, capacity: int) -> int:
    """Scratch for any step of up to `max_rows` rows over rings of `capacity` rows (much of it is rarely touched).

    The last part keeps what single splits leave to be merged; a step with more of it is cut by rows only.
    """
    parts = _PART_ROWS * heads * (capacity // SPLIT + 3)  # a ring begins and ends within splits, sinks lie in one more
    tasks = attention_offsets(max_rows, heads, head_dim)[-1]
    return tasks + ATTENTION_MAX_TASKS * attention_task_bytes(head_dim) + parts * (4 * head_dim + 8)


class SampleCall(IntEnum):
    """What `sample_row` needs to choose one token from one row of logits, and what it says back. docs/sampling.md."""

    LOGITS = 0
    """float32 [vocab], never written"""
    VOCAB = 1
    """1 to MAX_VOCAB"""
    HISTORY_IDS = 2
    """int32 [history]: the distinct tokens of prompt and answer"""
    HISTORY_COUNTS = 3
    """int32 [history]: how often each was generated (0: it stands in the prompt only)"""
    HISTORY = 4
    """0 when no penalty is on"""
    BIAS_IDS = 5
    """int32 [biases], distinct"""
    BIAS_VALUES = 6
    """float64 [biases]; -100 and below bans the token"""
    BIASES = 7
    MASK = 8
    """int32 [(vocab + 31) / 32], bit i % 32 of word i / 32 set where token i is allowed; 0: all are"""
    REPETITION = 9
    """float64 bits, as PRESENCE and FREQUENCY"""
    PRESENCE = 10
    FREQUENCY = 11
    DRY_TOKENS = 12
    """int32 [dry_window]: the last tokens of prompt and answer in order; -1 for one that holds a sequence breaker"""
    DRY_DISTANCES = 13
    """int32 [dry_window]: how many tokens before it the same token stood last; 0: nowhere, or before the window"""
    DRY_LENGTHS = 14
    """int32 [dry_window], scratch of this call alone while it runs"""
    DRY_WINDOW = 15
    """0 when DRY is off"""
    DRY_LIMIT = 16
    """how many tokens came after the last sequence breaker"""
    DRY_ALLOWED = 17
    """shortest repeat that is penalised, at least 1"""
    DRY_MULTIPLIER = 18
    """float64 bits, as all down to MIROSTAT_MU but TOP_K and MIROSTAT"""
    DRY_BASE = 19
    TOP_N_SIGMA = 20
    """0: off"""
    TEMPERATURE = 21
    TOP_K = 22
    TYPICAL_P = 23
    TOP_P = 24
    MIN_P = 25
    XTC_PROBABILITY = 26
    XTC_THRESHOLD = 27
    MIROSTAT = 28
    """1: mirostat with MIROSTAT_MU instead of all from TOP_K to XTC_THRESHOLD"""
    MIROSTAT_MU = 29
    SEED = 30
    """uint64 bits, as COUNTER"""
    COUNTER = 31
    LOGPROBS = 32
    """1: fill MAXIMUM, TOTAL and the alternatives"""
    ALTERNATIVES = 33
    """how many most probable tokens to list"""
    ALTERNATIVE_IDS = 34
    """int32 [alternatives], set: ids by falling raw logit, then rising id"""
    SCRATCH = 35
    """scratch of SCRATCH_BYTES >= sample_scratch_bytes(vocab), of this call alone while it runs"""
    SCRATCH_BYTES = 36
    TOKEN = 37
    """set: the chosen id"""
    MAXIMUM = 38
    """set, float64 bits: the largest raw logit"""
    TOTAL = 39
    """set, float64 bits: sum of exp(raw logit - MAXIMUM); log-softmax is logit - MAXIMUM - log(TOTAL)"""
    LISTED = 40
    """set: alternatives found; a raw logit of minus infinity is not listed"""
    SURPRISE = 41
    """set by mirostat, float64 bits: -log2 of the chosen token's probability before it cut any"""


class SampleStatus(IntEnum):
    """What `sample_row` returns."""

    OK = 0
    INVALID_ROW = 1
    """the raw logits hold NaN or plus infinity, or nothing but minus infinity"""
    NOTHING_ALLOWED = 2
    """bias and mask left no token"""
    BAD_CALL = 3
    """an argument lies out of its range"""


MAX_VOCAB = 1 << 20
"""most tokens that `sample_row` takes: its sums of weights stay exact up to here"""
MAX_DRY_WINDOW = 1 << 17
"""most tokens that DRY looks back"""
SAMPLE_BLOCK = 64
"""tokens whose largest logit is noted on the first look at a row"""


def sample_scratch_bytes(vocab: int) -> int:
    """Scratch of `sample_row`: five arrays of 4-byte numbers [vocab], padded to blocks, and two of a number a block."""
    blocks = (vocab + SAMPLE_BLOCK - 1) // SAMPLE_BLOCK
    return 4 * blocks * (5 * SAMPLE_BLOCK + 2)


CALL_FIELDS = 64
"""int64 fields of any ...Call record"""


class Activation(IntEnum):
    """GatedActivation's function of the gate."""

    SILU = 0
    GELU_TANH = 1


# --- records of an ONNX Runtime op -------------------------------------------------------------------------------------


class Workspace(IntEnum):
    """What the ops of one session share; ops of a session run one after another, two sessions never share one."""

    MAX_ROWS = 0
    """rows a step may have: sizes all scratch"""
    THREADS = 1
    CACHE = 2
    """address of the cache descriptor that the session was opened with"""
    X_BLOCKS = 3
    """scratch of `quantised_bytes(MAX_ROWS, X_INPUTS)`"""
    X_INPUTS = 6
    """widest `inputs` of a BlockLinear"""
    ATTENTION_SCRATCH = 7
    ATTENTION_SCRATCH_BYTES = 8
    TEAM = 9
    """address of the compiled function `team_run`"""
    YIELD = 10
    """address of the system's function that lets another thread run; 0: none is known"""
    PHASES = 11
    """address of MAX_PHASES records of phases, 64-byte aligned; these fields belong to `team`:"""
    MAX_PHASES = 12
    PHASE_COUNT = 13
    """how many wait to be run; the host sets it to 0 before a step"""
    PHASE_HEAD = 14
    """the last one that is linked to none before it"""
    ITEMS = 15
    """`Items` of the last one"""
    COLD = 16
    """the first one that does not know yet which weights are read next"""


WORKSPACE_FIELDS = 24


class Items(IntEnum):
    """What the items of a phase are. A thread goes on with an item of the next phase if both phases have the same ones."""

    TASKS = 0
    """anything: each may need all that was done before"""
    ROWS = 1
    """rows of the step, or for each row its parts: one reads and writes nothing of another"""
    HEADS = 2
    """heads of keys and values of the only row, likewise, within one call: another one has its scratch laid out otherwise"""


class Phase(IntEnum):
    """A phase of a step. The items of those that are linked to it follow on the same thread, item by item."""

    FUNCTION = 0
    """address of the compiled function (call, i)"""
    CALL = 1
    COUNT = 2
    LINKS = 3
    """how many of the next phases are linked to it"""
    WARM = 4
    """address of the weights that are read after it; 0: none"""
    WARM_BYTES = 5
    DONE = 8
    """items that have been done, with all that is linked"""
    NEXT = 9
    """the next item to be claimed of each share of the items, one share a thread"""


PHASE_FIELDS = 16
MAX_SHARES = PHASE_FIELDS - Phase.NEXT
PHASES_OF_AN_OP = 3
"""at most"""


class Op(IntEnum):
    """State of one op (ONNX Runtime's `op_kernel` pointer). Attributes start at ATTRIBUTE, the kernel's call record at CALL."""

    GET_INPUT = 0
    GET_OUTPUT = 1
    GET_DATA = 2
    GET_BYTES = 3
    PARALLEL_FOR = 4
    CREATE_STATUS = 5
    MESSAGE = 6
    """address of the text of the error that compute may return"""
    WORKSPACE = 7
    PLAN = 8
    """address of the compiled function that cuts a call into tasks (0: one task a row)"""
    FIRST_PHASE = 9
    """address of the compiled function (call, i) of the first phase; SECOND_PHASE and THIRD_PHASE run after it"""
    SECOND_PHASE = 10
    THIRD_PHASE = 11
    VALUE = 12
    """out-parameters of C calls: a value, a byte count, a pointer; then up to 3 output dimensions"""
    BYTES = 13
    POINTER = 14
    DIMENSIONS = 15
    READ_OUTSIDE = 18
    """1: something else than our ops reads an output, so all phases are run now"""
    FIRST_CONSTANT = 20
    """addresses of constant inputs, in the order of the op's inputs; 0: absent"""
    ATTRIBUTE = 28
    CALL = 40


OP_FIELDS = Op.CALL + CALL_FIELDS


class LinearOp(IntEnum):
    """BlockLinear's and BlockEmbedding's attributes, from Op.ATTRIBUTE on."""

    INPUTS = 0
    OUTPUTS = 1
    BITS = 2
    BLOCK = 3
    HAS_MINIMUM = 4
    SCALE = 5
    """float64 bits, BlockEmbedding only"""


class AttentionOp(IntEnum):
    """RingAttention's attributes, from Op.ATTRIBUTE on."""

    LAYER = 0
    HEADS = 1
    KV_HEADS = 2
    HEAD_DIM = 3
    ROTARY_DIM = 4
    ROPE_TABLE = 5
    """index of the rope table; -1 in the graph means none"""
    WINDOW = 6
    SCALE = 7
    SOFTCAP = 8
    EPS = 9
    ROPE_TABLES = 10
    SEGMENT_RECORDS = 11
    """address of AttentionCall.SEGMENT_RECORDS, of this op alone: all plans of a step are made before its calls are run"""


class NormOp(IntEnum):
    """RmsNorm's and AddRmsNorm's attributes, from Op.ATTRIBUTE on."""

    WIDTH = 0
    """elements a row; a multiple of GROUP, whose gamma every group shares"""
    GROUP = 1
    EPS = 2


class ActivationOp(IntEnum):
    """GatedActivation's attributes, from Op.ATTRIBUTE on."""

    WIDTH = 0
    KIND = 1
