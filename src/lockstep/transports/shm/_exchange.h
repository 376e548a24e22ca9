/* The collectives of shared memory in C: the same steps, ticks and bits as moving.py and reducing.py, without an
 * interpreter between them. They are optional: where no compiler is found, those two modules do the work.
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

/* as in compiled.py, signs.py and state.py */
enum Kind { BARRIER, ALL_REDUCE, REDUCE, BROADCAST, GATHER, SCATTER, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, KINDS };
enum Dtype { FLOAT32, FLOAT64, INT32, INT64, ADDED }; /* those that it adds; signs.py numbers others as well */
enum Outcome { WAITING, DONE, DIFFERENT };

enum { ALIGN = 64, LARGE = 64 << 10, MOST_RANKS = 1024, DTYPES = 64 };

/* looks that offer the core to others, after those that do not: some 50 us, if nobody wants it */
enum { OFFERS = 100 };

typedef struct {
    char *at;
    int64_t bytes;
} Part;

typedef struct Plan Plan;

/* One rank's view of the memory, and the collective that it is in. */
typedef struct {
    char *memory;
    int64_t rank, size, block, signs, chunk, halves, half_bytes;
    /* what arena.py and board.py use as well, when they do a step */
    long long tick, low, half, free_at[2];
    /* the collective: what it moves, and where its current chunk begins in each part */
    Part *in, *out;
    const Plan *plan;
    int64_t gives, gets; /* how many parts there are of each */
    int64_t whole, start, step;
    int64_t first, sign, told_bytes; /* the tick before its chunk, and what the others are told of it */
    int64_t weight;                  /* all its bytes here */
    int64_t root;
    int kind, dtype, phase, is_empty;
    /* what it waits for: that `whom`, or everyone if that is negative, has posted the tick */
    long long awaited, whom;
    /* who takes part in something else, if anyone: what it has told, and what it should have told */
    long long odd, told, expected;
} Exchange;

/* Says how many parts the next collective `gives` and `gets` here. */
void exchange_choose(Exchange *x, int kind, int64_t root);

/* Begins the collective that was chosen, when its `in`, `out` and `dtype` are set. */
void exchange_begin(Exchange *x);

/* Goes as far as it can. Whenever it has to wait it looks so often at the counters, and then a few times more while it
 * offers the core to others, before it gives up for now; `looks` below zero makes it give up at once. When ranks take
 * part in different things, `odd` is one that does not agree. */
enum Outcome exchange_go_on(Exchange *x, long looks);

/* A fragment of a message: `bytes` at `offset` into `total`, and where they lie here. */
typedef struct {
    int64_t tag, dtype, total, offset, bytes;
    char *data;
} Piece;

int64_t ring_bytes(int64_t fragment);

/* Write the next fragment after `done`; whether there was room for it. */
int ring_put(char *ring, int64_t fragment, int64_t done, const Piece *piece);

/* Read the next fragment after `done` if it is there and is a whole message like `piece`, of its dtype; whether it was.
 */
int ring_take(char *ring, int64_t fragment, int64_t done, const Piece *piece);

/* Look so often, and a few times more while offering the core to others, whether there is a fragment after `done`. */
int ring_await(const char *ring, int64_t done, long looks);

void exchange_copy(char *restrict to, const char *restrict from, int64_t bytes);

#endif
