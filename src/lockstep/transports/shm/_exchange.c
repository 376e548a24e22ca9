/* The phases of a rank in a collective: a few for each chunk, with waits between them.
 *
 * Counters are written with release and read with acquire order, so that data written before a counter is visible to
 * a rank that has seen the counter, and data read before a counter is written is not overwritten by a rank that waits
 * for the counter, on every processor (C11 5.1.2.4; on x86-64 both are plain moves, on ARM stlr and ldar).
 */
#include "_exchange.h"

#include <sched.h>
#include <string.h>

/* wider vectors where the processor has them, chosen when the module is loaded */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) /* musl has no ifunc */
#define FAST __attribute__((target_clones("avx2", "default"), optimize("no-tree-loop-distribute-patterns")))
#else
#define FAST
#endif

enum { ONE_TICK_BYTES = 32 << 10 }; /* as in collectives.py */

static const int64_t SIZES[SUM_DTYPES] = {4, 8, 4, 8};

/* After an action, a rank may post a tick and wait for others. */
enum { NO_RANK, ALL_RANKS, ROOT };
enum { EACH = -1 };
typedef struct {
    void (*action)(Exchange *); /* NULL ends the list */
    int posts, waits_for;
} Phase;

/* One role in a collective. A chunk takes so many `ticks`; it `reads_late` when a rank's last tick for a chunk does not
 * mean that it has read the chunk, but only the next one that it posts, in whatever collective; `writes`: whether it
 * writes to the slots; it has so many inputs and outputs (EACH: one for each rank). */
struct Plan {
    int ticks, reads_late, writes, input_count, output_count;
    Phase phases[4];
};

/* glibc's memcpy may choose "rep movsb", which some AMD processors run at a quarter of the speed of plain vector moves
 * for some alignments of source and destination (seen here at 64 KiB to 512 KiB). */
FAST void exchange_copy(char *restrict to, const char *restrict from, int64_t bytes) {
    typedef float Vector __attribute__((vector_size(32), aligned(1), may_alias));
    int64_t i = 0;
    for (; i + 32 <= bytes; i += 32) *(Vector *)(to + i) = *(const Vector *)(from + i);
    if (i < bytes) memcpy(to + i, from + i, (size_t)(bytes - i));
}

/* out = ((in[0] + in[1]) + in[2]) + ..., in rank order; out may be one of them */
#define DEFINE_SUM(NAME, TYPE)                                                                      \
    FAST static void NAME(char *out_, char *const *in, int64_t ranks, int64_t n) {                  \
        typedef TYPE Loose __attribute__((aligned(1), may_alias)); /* data may begin anywhere */    \
        Loose *out = (Loose *)out_;                                                                 \
        if (ranks == 2) {                                                                           \
            const Loose *a = (const Loose *)in[0], *b = (const Loose *)in[1];                       \
            for (int64_t i = 0; i < n; i++) out[i] = (TYPE)(a[i] + b[i]);                           \
            return;                                                                                 \
        }                                                                                           \
        enum { BLOCK = 512 };                                                                       \
        TYPE sum[BLOCK];                                                                            \
        for (int64_t begin = 0; begin < n; begin += BLOCK) {                                        \
            int64_t m = n - begin < BLOCK ? n - begin : BLOCK;                                      \
            memcpy(sum, (const Loose *)in[0] + begin, (size_t)m * sizeof(TYPE));                    \
            for (int64_t r = 1; r < ranks; r++) {                                                   \
                const Loose *part = (const Loose *)in[r] + begin;                                   \
                for (int64_t i = 0; i < m; i++) sum[i] = (TYPE)(sum[i] + part[i]);                  \
            }                                                                                       \
            memcpy(out + begin, sum, (size_t)m * sizeof(TYPE));                                     \
        }                                                                                           \
    }

/* integers wrap around, which C leaves undefined for signed ones */
DEFINE_SUM(sum_float32, float)
DEFINE_SUM(sum_float64, double)
DEFINE_SUM(sum_int32, uint32_t)
DEFINE_SUM(sum_int64, uint64_t)

typedef void (*Sum)(char *, char *const *, int64_t, int64_t);
static const Sum SUMS[SUM_DTYPES] = {sum_float32, sum_float64, sum_int32, sum_int64};

/* --- the memory --- */

static int64_t *words_of(const Exchange *x, int64_t rank) { return (int64_t *)(x->memory + rank * x->block); }

static char *slot(const Exchange *x, int64_t rank) {
    return x->memory + x->halves + x->half * x->half_bytes + rank * x->chunk;
}

static void post(Exchange *x) {
    int64_t *words = words_of(x, x->rank);
    if (x->plan->writes) words[x->signatures + x->half] = x->signature;
    x->tick += 1;
    __atomic_store_n(words, (int64_t)x->tick, __ATOMIC_RELEASE);
}

static int all_reached(Exchange *x, long long tick) {
    if (x->low >= tick) return 1;
    for (int64_t r = 0; r < x->size; r++)
        if (r != x->rank && __atomic_load_n(words_of(x, r), __ATOMIC_ACQUIRE) < tick) return 0;
    x->low = tick < x->tick ? tick : x->tick;
    return 1;
}

static int has_arrived(Exchange *x) {
    if (x->awaited_rank < 0) return all_reached(x, x->awaited_tick);
    return __atomic_load_n(words_of(x, x->awaited_rank), __ATOMIC_ACQUIRE) >= x->awaited_tick;
}

/* The signature of a collective: its kind, its dtype, its position in the order, and a size; as in signatures.py. */
static int64_t signature_of(const Exchange *x, int64_t bytes) {
    return (int64_t)x->kind << 59 | (int64_t)x->dtype << 53 | (x->first_tick & 0x1fff) << 40 |
           (bytes & (((int64_t)1 << 40) - 1));
}

/* Whether all ranks whose data this one is about to read are in the same collective, with sizes that fit. */
static int signatures_match(Exchange *x) {
    if (x->kind == BARRIER) return 1;
    for (int64_t r = 0; r < x->size; r++) {
        int64_t found_signature = words_of(x, r)[x->signatures + x->half];
        if (r == x->rank || (x->awaited_rank >= 0 && x->awaited_rank != r)) continue;
        x->expected_signature = x->kind == ALL_GATHER ? signature_of(x, x->out[r].bytes) : x->signature;
        if (found_signature == x->expected_signature) continue;
        x->mismatched_rank = r, x->found_signature = found_signature;
        return 0;
    }
    return 1;
}

/* --- actions --- */

static int64_t in_chunk(const Exchange *x, Part part) {
    int64_t left = part.bytes - x->start;
    return left < 0 ? 0 : left < x->step ? left : x->step;
}

/* Copy this chunk of a part from a slot, or to it */
static void take_from(const Exchange *x, Part part, const char *slot) {
    exchange_copy(part.at + x->start, slot, in_chunk(x, part));
}

static void put_into(const Exchange *x, char *slot, Part part) {
    exchange_copy(slot, part.at + x->start, in_chunk(x, part));
}

static void copy_own(const Exchange *x, Part from, Part to) {
    if (from.at != to.at) put_into(x, to.at + x->start, from);
}

static void no_action(Exchange *x) { (void)x; }

static void put_input(Exchange *x) { put_into(x, slot(x, x->rank), x->in[0]); }

static void take_from_root(Exchange *x) { take_from(x, x->out[0], slot(x, x->root)); }

static void take_own_slot(Exchange *x) { take_from(x, x->out[0], slot(x, x->rank)); }

static void take_result(Exchange *x) { take_from(x, x->out[0], slot(x, x->size)); }

static void take_each(Exchange *x) {
    for (int64_t r = 0; r < x->size; r++) {
        if (r != x->rank) take_from(x, x->out[r], slot(x, r));
        else copy_own(x, x->in[0], x->out[r]);
    }
}

static void put_each(Exchange *x) {
    for (int64_t r = 0; r < x->size; r++)
        if (r != x->rank) put_into(x, slot(x, r), x->in[r]);
    copy_own(x, x->in[x->rank], x->out[0]); /* last, as the output may be one of the inputs */
}

/* The slice of a chunk that this rank sums */
static void slice(const Exchange *x, int64_t *begin, int64_t *end) {
    int64_t bytes = in_chunk(x, x->in[0]), size = SIZES[x->dtype];
    int64_t per = ((bytes / size + x->size - 1) / x->size * size + ALIGN - 1) / ALIGN * ALIGN;
    *begin = x->rank * per < bytes ? x->rank * per : bytes;
    *end = *begin + per < bytes ? *begin + per : bytes;
}

/* Sums `bytes` at `offset` in each slot, for this rank at `own`. */
static void sum_into(const Exchange *x, char *out, char *own, int64_t offset, int64_t bytes) {
    char *parts[MAX_RANKS];
    for (int64_t r = 0; r < x->size; r++) parts[r] = r == x->rank ? own : slot(x, r) + offset;
    SUMS[x->dtype](out, parts, x->size, bytes / SIZES[x->dtype]);
}

static void sum_inputs(Exchange *x) {
    char *data = x->in[0].at + x->start;
    sum_into(x, data, data, 0, in_chunk(x, x->in[0]));
}

static void put_others_slices(Exchange *x) { /* no other rank reads this rank's own */
    int64_t begin, end, bytes = in_chunk(x, x->in[0]);
    char *mine = slot(x, x->rank), *data = x->in[0].at + x->start;
    slice(x, &begin, &end);
    exchange_copy(mine, data, begin);
    exchange_copy(mine + end, data + end, bytes - end);
}

static void sum_slice(Exchange *x) {
    int64_t begin, end;
    slice(x, &begin, &end);
    char *data = x->in[0].at + x->start + begin;
    sum_into(x, data, data, begin, end - begin);
    exchange_copy(slot(x, x->size) + begin, data, end - begin);
}

static void take_others_slices(Exchange *x) {
    int64_t begin, end, bytes = in_chunk(x, x->in[0]);
    char *result = slot(x, x->size), *data = x->in[0].at + x->start;
    slice(x, &begin, &end);
    exchange_copy(data, result, begin);
    exchange_copy(data + end, result + end, bytes - end);
}

static void sum_slice_for_root(Exchange *x) {
    int64_t begin, end;
    slice(x, &begin, &end);
    sum_into(x, slot(x, x->size) + begin, x->in[0].at + x->start + begin, begin, end - begin);
}

static void put_parts(Exchange *x) {
    for (int64_t r = 0; r < x->size; r++)
        if (r != x->rank) put_into(x, slot(x, x->rank) + r * x->step, x->in[r]);
}

static void sum_part(Exchange *x) {
    char *own = x->in[x->rank].at + x->start;
    sum_into(x, x->out[0].at + x->start, own, x->rank * x->step, in_chunk(x, x->out[0]));
}

/* In an all-to-all a slot begins with a header: the most bytes that its rank sends to any rank, then those to each. */
static int64_t header(const Exchange *x) { return ((x->size + 1) * 8 + ALIGN - 1) / ALIGN * ALIGN; }

static void put_pieces(Exchange *x) {
    char *mine = slot(x, x->rank);
    int64_t *sizes = (int64_t *)mine, most = 0;
    for (int64_t r = 0; r < x->size; r++) {
        sizes[1 + r] = x->in[r].bytes;
        if (x->in[r].bytes > most) most = x->in[r].bytes;
        if (r != x->rank) put_into(x, mine + header(x) + r * x->step, x->in[r]);
    }
    sizes[0] = most;
}

static void take_pieces(Exchange *x) {
    for (int64_t r = 0; r < x->size; r++) {
        const int64_t *sizes = (const int64_t *)slot(x, r);
        if (sizes[0] > x->longest) x->longest = sizes[0];
        if (sizes[1 + x->rank] == x->out[r].bytes) continue;
        x->mismatched_rank = r;
        x->found_signature = signature_of(x, sizes[1 + x->rank]);
        x->expected_signature = signature_of(x, x->out[r].bytes);
        return;
    }
    for (int64_t r = 0; r < x->size; r++) {
        if (r != x->rank) take_from(x, x->out[r], slot(x, r) + header(x) + x->rank * x->step);
        else copy_own(x, x->in[r], x->out[r]);
    }
}

/* --- collectives --- */

static const Plan ONE_TICK_ALL_REDUCE = {1, 1, 1, 1, 1, {{put_input, 1, ALL_RANKS}, {sum_inputs, 0, NO_RANK}}};

static const Plan PLANS[KINDS][2] = {
    /* the plan of all ranks but the root, and the root's where it differs */
    [BARRIER] = {{1, 0, 0, 0, 0, {{no_action, 1, ALL_RANKS}, {no_action, 0, NO_RANK}}}},
    [ALL_REDUCE] = {{2, 1, 1, 1, 1,
                     {{put_others_slices, 1, ALL_RANKS}, {sum_slice, 1, ALL_RANKS}, {take_others_slices, 0, NO_RANK}}}},
    [REDUCE] = {{3, 0, 1, 1, 1, {{put_input, 1, ALL_RANKS}, {sum_slice_for_root, 1, NO_RANK}, {no_action, 1, NO_RANK}}},
                {3, 0, 1, 1, 1,
                 {{put_input, 1, ALL_RANKS}, {sum_slice_for_root, 1, ALL_RANKS}, {take_result, 1, NO_RANK}}}},
    [BROADCAST] = {{1, 0, 0, 1, 1, {{no_action, 0, ROOT}, {take_from_root, 1, NO_RANK}}},
                   {1, 0, 1, 1, 1, {{put_input, 1, NO_RANK}}}},
    [GATHER] = {{1, 0, 1, 1, 0, {{put_input, 1, NO_RANK}}},
                {1, 0, 0, 1, EACH, {{no_action, 0, ALL_RANKS}, {take_each, 1, NO_RANK}}}},
    [SCATTER] = {{1, 0, 0, 0, 1, {{no_action, 0, ROOT}, {take_own_slot, 1, NO_RANK}}},
                 {1, 0, 1, EACH, 1, {{put_each, 1, NO_RANK}}}},
    [ALL_GATHER] = {{1, 1, 1, 1, EACH, {{put_input, 1, ALL_RANKS}, {take_each, 0, NO_RANK}}}},
    [ALL_TO_ALL] = {{1, 1, 1, EACH, EACH, {{put_pieces, 1, ALL_RANKS}, {take_pieces, 0, NO_RANK}}}},
    [REDUCE_SCATTER] = {{1, 1, 1, EACH, 1, {{put_parts, 1, ALL_RANKS}, {sum_part, 0, NO_RANK}}}},
};

/* The next chunk begins when all ranks have read the last one in its half; a rank that does not write there need not
 * wait for that. */
static void claim_half(Exchange *x) {
    x->phase = 0, x->awaited_rank = -1, x->awaited_tick = 0, x->first_tick = x->tick;
    if (x->kind == BARRIER) return;
    x->half ^= 1;
    if (x->plan->writes) x->awaited_tick = x->free_at[x->half];
    x->free_at[x->half] = x->tick + x->plan->ticks + x->plan->reads_late;
    x->signature = signature_of(x, x->signature_bytes);
}

static int64_t total_bytes_of(const Part *parts, int64_t count, int64_t *most) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += parts[i].bytes;
        if (parts[i].bytes > *most) *most = parts[i].bytes;
    }
    return sum;
}

void exchange_choose(Exchange *x, int kind, int64_t root) {
    x->kind = kind, x->root = root, x->plan = &PLANS[kind][root == x->rank && PLANS[kind][1].ticks > 0];
    x->input_count = x->plan->input_count == EACH ? x->size : x->plan->input_count;
    x->output_count = x->plan->output_count == EACH ? x->size : x->plan->output_count;
}

void exchange_begin(Exchange *x) {
    int64_t most = 0;
    int64_t given = total_bytes_of(x->in, x->input_count, &most), got = total_bytes_of(x->out, x->output_count, &most);
    x->total_bytes = given > got ? given : got;
    x->longest = most, x->start = 0, x->step = x->chunk, x->mismatched_rank = -1;
    x->signature_bytes = x->kind == SCATTER ? got : x->kind == ALL_TO_ALL ? 0 : given;
    if (x->kind == ALL_REDUCE && most * (x->size - 1) <= ONE_TICK_BYTES && most <= x->chunk)
        x->plan = &ONE_TICK_ALL_REDUCE;
    if (x->kind == REDUCE_SCATTER) x->step = x->chunk / x->size / ALIGN * ALIGN;
    if (x->kind == ALL_TO_ALL) x->step = (x->chunk - header(x)) / x->size / ALIGN * ALIGN;
    x->is_empty = most == 0 && x->kind != BARRIER && x->kind != ALL_TO_ALL; /* no data */
    if (!x->is_empty) claim_half(x);
}

/* Run the next action, and set the tick to wait for after it */
static void run_action(Exchange *x, const Phase *phase) {
    phase->action(x);
    if (phase->posts) post(x);
    x->awaited_rank = phase->waits_for == ROOT ? x->root : -1;
    /* a rank that has not posted waits for those that have */
    x->awaited_tick = phase->waits_for == NO_RANK ? 0 : x->tick + !phase->posts;
}

static enum Outcome advance(Exchange *x) {
    while (!x->is_empty) {
        const Phase *phase = &x->plan->phases[x->phase];
        if (!has_arrived(x)) return WAITING;
        if (x->phase > 0 && phase->action != NULL && x->awaited_tick > 0 && !signatures_match(x)) return MISMATCH;
        if (phase->action != NULL) {
            run_action(x, phase);
            if (x->mismatched_rank >= 0) return MISMATCH;
            x->phase++;
        } else {
            x->start += x->step;
            if (x->start >= x->longest) return DONE;
            claim_half(x);
        }
    }
    return DONE;
}

enum Outcome exchange_advance(Exchange *x, long spins) {
    for (long i = 0;; i++) {
        long long tick = x->tick;
        int phase = x->phase;
        enum Outcome outcome = advance(x);
        if (outcome != WAITING || spins < 0 || i >= spins + YIELDS) return outcome;
        if (x->tick != tick || x->phase != phase) i = 0; /* a new wait */
        if (i < spins) PAUSE();
        else sched_yield(); /* to the awaited rank, should it be on the same core */
    }
}
