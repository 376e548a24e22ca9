/* The rings of messages: a counter of fragments written, one of fragments read, and the fragments with their headers.
 * Counters are written with release and read with acquire order, as in _exchange.c.
 */
#include "_exchange.h"

#include <sched.h>

enum { LINE = 128, HEADER = 64, RING = 4 }; /* as in layout.py */

static int64_t load(const char *at) { return __atomic_load_n((const int64_t *)at, __ATOMIC_ACQUIRE); }

static void store(char *at, int64_t value) { __atomic_store_n((int64_t *)at, value, __ATOMIC_RELEASE); }

static char *place(char *ring, int64_t fragment, int64_t done) {
    return ring + 2 * LINE + done % RING * (HEADER + fragment);
}

int64_t ring_bytes(int64_t fragment) { return 2 * LINE + RING * (HEADER + fragment); }

int ring_put(char *ring, int64_t fragment, int64_t done, const Piece *piece) {
    if (done - load(ring + LINE) >= RING) return 0;
    char *at = place(ring, fragment, done);
    int64_t *header = (int64_t *)at;
    header[0] = piece->tag, header[1] = piece->dtype;
    header[2] = piece->total, header[3] = piece->offset, header[4] = piece->bytes;
    exchange_copy(at + HEADER, piece->data, piece->bytes);
    store(ring, done + 1);
    return 1;
}

int ring_take(char *ring, int64_t fragment, int64_t done, const Piece *piece) {
    if (load(ring) <= done) return 0;
    const char *at = place(ring, fragment, done);
    const int64_t *header = (const int64_t *)at;
    if (header[0] != piece->tag || header[1] != piece->dtype) return 0;
    if (header[2] != piece->bytes || header[3] != 0 || header[4] != piece->bytes) return 0;
    exchange_copy(piece->data, at + HEADER, piece->bytes);
    store(ring + LINE, done + 1);
    return 1;
}

int ring_await(const char *ring, int64_t done, long looks) {
    for (long i = 0; i < looks + OFFERS; i++) {
        if (load(ring) > done) return 1;
        if (i < looks) PAUSE();
        else sched_yield();
    }
    return 0;
}
