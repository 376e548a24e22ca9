/* The collectives of shared memory in C: the same steps, ticks and bits as collectives.py, without an interpreter
 * between them. They are optional: where no compiler is found, that module does the work.
 */
#ifndef LOCKSTEP_EXCHANGE_H
#define LOCKSTEP_EXCHANGE_H

#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

/* as in native.py, signatures.py and rank_states.py */
enum Kind { BARRIER, ALL_REDUCE, REDUCE, BROADCAST, GATHER, SCATTER, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, KINDS };
enum Dtype { FLOAT32, FLOAT64, INT32, INT64, SUM_DTYPES }; /* those that it sums; signatures.py numbers others too */
enum Outcome { WAITING, DONE, MISMATCH };

enum { ALIGN = 64, LARGE = 64 << 10, MAX_RANKS = 1024, DTYPES = 64 };

/* polls that yield the core, after those that spin: some 50 us, if no other thread wants it */
enum { YIELDS = 100 };

typedef struct {
    char *at;
    int64_t bytes;
} Part;

typedef struct Plan Plan;

/* One rank's view of the memory, and the collective that it is in. */
typedef struct {
    char *memory;
    int64_t rank, size, block, signatures, chunk, halves, half_bytes;
    /* what chunk_buffers.py and rank_states.py use as well, when they do a step */
    long long tick, low, half, free_at[2];
    /* the collective: its inputs and outputs, and where its current chunk begins in each part */
    Part *in, *out;
    const Plan *plan;
    int64_t input_count, output_count; /* how many parts there are of each */
    int64_t longest, start, step;
    int64_t first_tick, signature, signature_bytes; /* the tick before its chunk, and the chunk's signature */
    int64_t total_bytes;                            /* of its inputs, or of its outputs if that is more */
    int64_t root;
    int kind, dtype, phase, is_empty;
    /* what it waits for: that this rank, or every rank if it is negative, has posted the tick */
    long long awaited_tick, awaited_rank;
    /* the rank that is in another collective, or -1: its signature, and the one that it should have */
    long long mismatched_rank, found_signature, expected_signature;
} Exchange;

/* Sets `input_count` and `output_count` of the next collective. */
void exchange_choose(Exchange *x, int kind, int64_t root);

/* Begins the collective that was chosen, when its `in`, `out` and `dtype` are set. */
void exchange_begin(Exchange *x);

/* Proceeds as far as it can. Whenever it has to wait it polls the counters `spins` times, and then a few times more
 * while it yields the core, before it returns; `spins` below zero makes it return at once. When ranks are in different
 * collectives, `mismatched_rank` is one whose signature differs. */
enum Outcome exchange_advance(Exchange *x, long spins);

/* A fragment of a message: `bytes` at `offset` into `total`, and their address here. */
typedef struct {
    int64_t tag, dtype, total, offset, bytes;
    char *data;
} Fragment;

int64_t ring_bytes(int64_t fragment_bytes);

/* Writes the fragment that follows the first `done`; whether there was room for it. */
int ring_put(char *ring, int64_t fragment_bytes, int64_t done, const Fragment *fragment);

/* Reads the fragment that follows the first `done` if it is there and is a whole message like `fragment`, of its dtype;
 * whether it was. */
int ring_take(char *ring, int64_t fragment_bytes, int64_t done, const Fragment *fragment);

/* Polls `spins` times, and a few times more while yielding the core, for the fragment that follows the first `done`. */
int ring_spin(const char *ring, int64_t done, long spins);

void exchange_copy(char *restrict to, const char *restrict from, int64_t bytes);

#endif
