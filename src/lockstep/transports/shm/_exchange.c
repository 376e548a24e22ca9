/* What a rank does in a collective: a few phases for each chunk, with waits between them.
 *
 * Counters are written with release and read with acquire order, so that data written before a counter is seen by
 * whoever has seen the counter, and data read before a counter is written is not yet overwritten by whoever waits for
 * it, on every processor (C11 5.1.2.4; on x86-64 both are plain moves, on ARM stlr and ldar).
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

enum { WHOLE = 32 << 10 }; /* as in reducing.py */

static const int64_t SIZES[ADDED] = {4, 8, 4, 8};

/* After an action, a rank may post a tick and wait for others. */
enum { NOBODY, EVERYONE, ROOT };
enum { EACH = -1 };
typedef struct {
    void (*act)(Exchange *); /* NULL ends the list */
    int posts, waits_for;
} Phase;

/* One role in a collective. `ticks` are those that a chunk takes; it `lingers` when a rank's last tick for a chunk does
 * not yet say that it has read it, but only the next one that it posts, whatever for; it `writes` to the slots, gives
 * so many parts, and gets so many (EACH: one for each rank). */
struct Plan {
    int ticks, lingers, writes, gives, gets;
    Phase phases[4];
};

/* glibc's memcpy may choose "rep movsb", which some AMD processors run at a quarter of the speed of plain vector moves
 * when source and destination lie unluckily to each other (seen here at 64 KiB to 512 KiB). */
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
static const Sum SUMS[ADDED] = {sum_float32, sum_float64, sum_int32, sum_int64};

/* --- the memory --- */

static int64_t *words_of(const Exchange *x, int64_t rank) { return (int64_t *)(x->memory + rank * x->block); }

static char *slot(const Exchange *x, int64_t rank) {
    return x->memory + x->halves + x->half * x->half_bytes + rank * x->chunk;
}

static void post(Exchange *x) {
    int64_t *words = words_of(x, x->rank);
    if (x->plan->writes) words[x->signs + x->half] = x->sign;
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

static int has_come(Exchange *x) {
    if (x->whom < 0) return all_reached(x, x->awaited);
    return __atomic_load_n(words_of(x, x->whom), __ATOMIC_ACQUIRE) >= x->awaited;
}

/* What a rank tells of the collective that it takes part in: its kind, its dtype, its place in the order, and some
 * size; as in signs.py. */
static int64_t sign_of(const Exchange *x, int64_t bytes) {
    return (int64_t)x->kind << 59 | (int64_t)x->dtype << 53 | (x->first & 0x1fff) << 40 |
           (bytes & (((int64_t)1 << 40) - 1));
}

/* Whether all whose data this rank is about to read take part in the same collective, with sizes that fit. */
static int all_agree(Exchange *x) {
    if (x->kind == BARRIER) return 1;
    for (int64_t r = 0; r < x->size; r++) {
        int64_t told = words_of(x, r)[x->signs + x->half];
        if (r == x->rank || (x->whom >= 0 && x->whom != r)) continue;
        x->expected = x->kind == ALL_GATHER ? sign_of(x, x->out[r].bytes) : x->sign;
        if (told == x->expected) continue;
        x->odd = r, x->told = told;
        return 0;
    }
    return 1;
}

/* --- actions --- */

static int64_t in_chunk(const Exchange *x, Part part) {
    int64_t left = part.bytes - x->start;
    return left < 0 ? 0 : left < x->step ? left : x->step;
}

/* Of what lies in `slot` the part's share of this chunk, and the other way round */
static void take_from(const Exchange *x, Part part, const char *slot) {
    exchange_copy(part.at + x->start, slot, in_chunk(x, part));
}

static void put_into(const Exchange *x, char *slot, Part part) {
    exchange_copy(slot, part.at + x->start, in_chunk(x, part));
}

static void keep(const Exchange *x, Part from, Part to) {
    if (from.at != to.at) put_into(x, to.at + x->start, from);
}

static void nothing(Exchange *x) { (void)x; }

static void put_whole(Exchange *x) { put_into(x, slot(x, x->rank), x->in[0]); }

static void take_roots(Exchange *x) { take_from(x, x->out[0], slot(x, x->root)); }

static void take_mine(Exchange *x) { take_from(x, x->out[0], slot(x, x->rank)); }

static void take_result(Exchange *x) { take_from(x, x->out[0], slot(x, x->size)); }

static void take_each(Exchange *x) {
    for (int64_t r = 0; r < x->size; r++) {
        if (r != x->rank) take_from(x, x->out[r], slot(x, r));
        else keep(x, x->in[0], x->out[r]);
    }
}

static void put_each(Exchange *x) {
    for (int64_t r = 0; r < x->size; r++)
        if (r != x->rank) put_into(x, slot(x, r), x->in[r]);
    keep(x, x->in[x->rank], x->out[0]); /* last, as the output may be one of the inputs */
}

/* The slice of a chunk that this rank adds */
static void slice(const Exchange *x, int64_t *begin, int64_t *end) {
    int64_t bytes = in_chunk(x, x->in[0]), size = SIZES[x->dtype];
    int64_t per = ((bytes / size + x->size - 1) / x->size * size + ALIGN - 1) / ALIGN * ALIGN;
    *begin = x->rank * per < bytes ? x->rank * per : bytes;
    *end = *begin + per < bytes ? *begin + per : bytes;
}

/* Adds up `bytes` that lie `offset` into each slot, or for this rank at `own`. */
static void sum_into(const Exchange *x, char *out, char *own, int64_t offset, int64_t bytes) {
    char *parts[MOST_RANKS];
    for (int64_t r = 0; r < x->size; r++) parts[r] = r == x->rank ? own : slot(x, r) + offset;
    SUMS[x->dtype](out, parts, x->size, bytes / SIZES[x->dtype]);
}

static void sum_whole(Exchange *x) {
    char *data = x->in[0].at + x->start;
    sum_into(x, data, data, 0, in_chunk(x, x->in[0]));
}

static void put_others_slices(Exchange *x) { /* nobody else reads this rank's own */
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

/* In an all-to-all a slot begins with the bytes that its rank has for each, and before them the most. */
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
        if (sizes[0] > x->whole) x->whole = sizes[0];
        if (sizes[1 + x->rank] == x->out[r].bytes) continue;
        x->odd = r, x->told = sign_of(x, sizes[1 + x->rank]), x->expected = sign_of(x, x->out[r].bytes);
        return;
    }
    for (int64_t r = 0; r < x->size; r++) {
        if (r != x->rank) take_from(x, x->out[r], slot(x, r) + header(x) + x->rank * x->step);
        else keep(x, x->in[r], x->out[r]);
    }
}

/* --- collectives --- */

static const Plan WHOLE_ALL_REDUCE = {1, 1, 1, 1, 1, {{put_whole, 1, EVERYONE}, {sum_whole, 0, NOBODY}}};

static const Plan PLANS[KINDS][2] = {
    /* of the others, and of the root where it plays another part */
    [BARRIER] = {{1, 0, 0, 0, 0, {{nothing, 1, EVERYONE}, {nothing, 0, NOBODY}}}},
    [ALL_REDUCE] = {{2, 1, 1, 1, 1,
                     {{put_others_slices, 1, EVERYONE}, {sum_slice, 1, EVERYONE}, {take_others_slices, 0, NOBODY}}}},
    [REDUCE] = {{3, 0, 1, 1, 1, {{put_whole, 1, EVERYONE}, {sum_slice_for_root, 1, NOBODY}, {nothing, 1, NOBODY}}},
                {3, 0, 1, 1, 1,
                 {{put_whole, 1, EVERYONE}, {sum_slice_for_root, 1, EVERYONE}, {take_result, 1, NOBODY}}}},
    [BROADCAST] = {{1, 0, 0, 1, 1, {{nothing, 0, ROOT}, {take_roots, 1, NOBODY}}},
                   {1, 0, 1, 1, 1, {{put_whole, 1, NOBODY}}}},
    [GATHER] = {{1, 0, 1, 1, 0, {{put_whole, 1, NOBODY}}},
                {1, 0, 0, 1, EACH, {{nothing, 0, EVERYONE}, {take_each, 1, NOBODY}}}},
    [SCATTER] = {{1, 0, 0, 0, 1, {{nothing, 0, ROOT}, {take_mine, 1, NOBODY}}},
                 {1, 0, 1, EACH, 1, {{put_each, 1, NOBODY}}}},
    [ALL_GATHER] = {{1, 1, 1, 1, EACH, {{put_whole, 1, EVERYONE}, {take_each, 0, NOBODY}}}},
    [ALL_TO_ALL] = {{1, 1, 1, EACH, EACH, {{put_pieces, 1, EVERYONE}, {take_pieces, 0, NOBODY}}}},
    [REDUCE_SCATTER] = {{1, 1, 1, EACH, 1, {{put_parts, 1, EVERYONE}, {sum_part, 0, NOBODY}}}},
};

/* The next chunk begins when all have read what was in its half; who does not write there need not wait for that. */
static void claim(Exchange *x) {
    x->phase = 0, x->whom = -1, x->awaited = 0, x->first = x->tick;
    if (x->kind == BARRIER) return;
    x->half ^= 1;
    if (x->plan->writes) x->awaited = x->free_at[x->half];
    x->free_at[x->half] = x->tick + x->plan->ticks + x->plan->lingers;
    x->sign = sign_of(x, x->told_bytes);
}

static int64_t add_up(const Part *parts, int64_t count, int64_t *most) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += parts[i].bytes;
        if (parts[i].bytes > *most) *most = parts[i].bytes;
    }
    return sum;
}

void exchange_choose(Exchange *x, int kind, int64_t root) {
    x->kind = kind, x->root = root, x->plan = &PLANS[kind][root == x->rank && PLANS[kind][1].ticks > 0];
    x->gives = x->plan->gives == EACH ? x->size : x->plan->gives;
    x->gets = x->plan->gets == EACH ? x->size : x->plan->gets;
}

void exchange_begin(Exchange *x) {
    int64_t most = 0, given = add_up(x->in, x->gives, &most), got = add_up(x->out, x->gets, &most);
    x->weight = given > got ? given : got;
    x->whole = most, x->start = 0, x->step = x->chunk, x->odd = -1;
    x->told_bytes = x->kind == SCATTER ? got : x->kind == ALL_TO_ALL ? 0 : given;
    if (x->kind == ALL_REDUCE && most * (x->size - 1) <= WHOLE && most <= x->chunk) x->plan = &WHOLE_ALL_REDUCE;
    if (x->kind == REDUCE_SCATTER) x->step = x->chunk / x->size / ALIGN * ALIGN;
    if (x->kind == ALL_TO_ALL) x->step = (x->chunk - header(x)) / x->size / ALIGN * ALIGN;
    x->is_empty = most == 0 && x->kind != BARRIER && x->kind != ALL_TO_ALL; /* there is nothing to do */
    if (!x->is_empty) claim(x);
}

/* The next action, and what is to be waited for after it */
static void act(Exchange *x, const Phase *phase) {
    phase->act(x);
    if (phase->posts) post(x);
    x->whom = phase->waits_for == ROOT ? x->root : -1;
    /* who has not posted yet waits for those who have */
    x->awaited = phase->waits_for == NOBODY ? 0 : x->tick + !phase->posts;
}

static enum Outcome advance(Exchange *x) {
    while (!x->is_empty) {
        const Phase *phase = &x->plan->phases[x->phase];
        if (!has_come(x)) return WAITING;
        if (x->phase > 0 && phase->act != NULL && x->awaited > 0 && !all_agree(x)) return DIFFERENT;
        if (phase->act != NULL) {
            act(x, phase);
            if (x->odd >= 0) return DIFFERENT;
            x->phase++;
        } else {
            x->start += x->step;
            if (x->start >= x->whole) return DONE;
            claim(x);
        }
    }
    return DONE;
}

enum Outcome exchange_go_on(Exchange *x, long looks) {
    for (long i = 0;; i++) {
        long long tick = x->tick;
        int phase = x->phase;
        enum Outcome outcome = advance(x);
        if (outcome != WAITING || looks < 0 || i >= looks + OFFERS) return outcome;
        if (x->tick != tick || x->phase != phase) i = 0; /* a new wait */
        if (i < looks) PAUSE();
        else sched_yield(); /* to the awaited, should they be on the same core */
    }
}
