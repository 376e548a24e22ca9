/* The all-reduce of shared memory in C: the same steps, ticks and sums as reducing.py, without an interpreter between
 * them. It is optional: where no compiler is found, reducing.py does the work.
 *
 * Counters are written with release and read with acquire order, so that data written before a counter is seen by
 * whoever has seen the counter, on every processor (C11 5.1.2.4; on x86-64 both are plain moves, on ARM stlr and ldar).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

/* wider vectors where the processor has them, chosen when the module is loaded */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__) /* musl has no ifunc */
#define FAST __attribute__((target_clones("avx2", "default"), optimize("no-tree-loop-distribute-patterns")))
#else
#define FAST
#endif

enum { FLOAT32, FLOAT64, INT32, INT64, DTYPES };
static const int64_t SIZES[DTYPES] = {4, 8, 4, 8};

enum { WHOLE = 32 << 10, /* as in reducing.py */ ALIGN = 64, RELEASE_GIL = 64 << 10, MOST_RANKS = 1024 };

/* What one rank knows of the exchange; reducing.py and arena.py use the same fields when they do a step. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    long long tick, low, half, free_0, free_1;
    long long rank, size, block, chunk, halves, half_bytes;
} State;

/* An all-reduce under way. */
typedef struct {
    PyObject_HEAD
    State *state;
    char *data;
    int64_t count, start; /* elements, and where the chunk begins */
    long long awaited;    /* the tick that all must post before the next phase */
    int dtype, phase, whole;
} Task;

enum { CLAIM, FILL, ADD, TAKE, NEXT };

/* glibc's memcpy may choose "rep movsb", which some AMD processors run at a quarter of the speed of plain vector moves
 * when source and destination lie unluckily to each other (seen here at 64 KiB to 512 KiB). */
FAST static void copy(char *restrict to, const char *restrict from, int64_t bytes) {
    typedef float Vector __attribute__((vector_size(32), aligned(1), may_alias));
    int64_t i = 0;
    for (; i + 32 <= bytes; i += 32) *(Vector *)(to + i) = *(const Vector *)(from + i);
    if (i < bytes) memcpy(to + i, from + i, (size_t)(bytes - i));
}

static int64_t *counter(State *s, int64_t rank) { return (int64_t *)((char *)s->memory.buf + rank * s->block); }

static char *slot(State *s, int64_t rank) {
    return (char *)s->memory.buf + s->halves + s->half * s->half_bytes + rank * s->chunk;
}

static void post(State *s) {
    s->tick += 1;
    __atomic_store_n(counter(s, s->rank), (int64_t)s->tick, __ATOMIC_RELEASE);
}

static int all_reached(State *s, long long tick) {
    if (s->low >= tick) return 1;
    for (int64_t r = 0; r < s->size; r++)
        if (r != s->rank && __atomic_load_n(counter(s, r), __ATOMIC_ACQUIRE) < tick) return 0;
    s->low = tick < s->tick ? tick : s->tick;
    return 1;
}

/* out = ((in[0] + in[1]) + in[2]) + ..., in rank order; out may be one of them */
#define DEFINE_SUM(NAME, TYPE)                                                                      \
    FAST static void NAME(char *out_, char *const *in, int64_t ranks, int64_t n) {                       \
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
static const Sum SUMS[DTYPES] = {sum_float32, sum_float64, sum_int32, sum_int64};

static int64_t chunk_count(const Task *t) {
    int64_t most = t->state->chunk / SIZES[t->dtype], left = t->count - t->start;
    return left < most ? left : most;
}

static void slice_of(const Task *t, int64_t n, int64_t *begin, int64_t *end) {
    int64_t ranks = t->state->size, step = ALIGN / SIZES[t->dtype];
    int64_t per = (n + ranks - 1) / ranks;
    per = (per + step - 1) / step * step;
    *begin = t->state->rank * per < n ? t->state->rank * per : n;
    *end = *begin + per < n ? *begin + per : n;
}

static void fill(Task *t) {
    State *s = t->state;
    int64_t n = chunk_count(t), size = SIZES[t->dtype], begin, end;
    char *mine = slot(s, s->rank), *data = t->data + t->start * size;
    if (t->whole) {
        copy(mine, data, n * size);
    } else {
        slice_of(t, n, &begin, &end); /* nobody else reads this rank's own slice */
        copy(mine, data, begin * size);
        copy(mine + end * size, data + end * size, (n - end) * size);
    }
    post(s);
}

static void add(Task *t) {
    State *s = t->state;
    int64_t n = chunk_count(t), size = SIZES[t->dtype], begin = 0, end = n;
    char *parts[MOST_RANKS], *data = t->data + t->start * size;
    if (!t->whole) slice_of(t, n, &begin, &end);
    for (int64_t r = 0; r < s->size; r++)
        parts[r] = (r == s->rank && !t->whole ? data : slot(s, r)) + begin * size;
    SUMS[t->dtype](data + begin * size, parts, s->size, end - begin);
    if (t->whole) return;
    copy(slot(s, s->size) + begin * size, data + begin * size, (end - begin) * size);
    post(s);
}

static void take(Task *t) {
    State *s = t->state;
    int64_t n = chunk_count(t), size = SIZES[t->dtype], begin, end;
    char *result = slot(s, s->size), *data = t->data + t->start * size;
    slice_of(t, n, &begin, &end);
    copy(data, result, begin * size);
    copy(data + end * size, result + end * size, (n - end) * size);
}

/* As far as it goes without waiting; whether the whole is done. */
static int go_on(Task *t) {
    State *s = t->state;
    for (;;) {
        if (!all_reached(s, t->awaited)) return 0;
        switch (t->phase) {
        case CLAIM: {
            s->half ^= 1;
            long long *free_at = s->half ? &s->free_1 : &s->free_0;
            t->awaited = *free_at;
            *free_at = s->tick + (t->whole ? 1 : 2) + 1;
            t->phase = FILL;
            break;
        }
        case FILL:
            fill(t);
            t->awaited = s->tick;
            t->phase = ADD;
            break;
        case ADD:
            add(t);
            t->awaited = s->tick;
            t->phase = t->whole ? NEXT : TAKE;
            break;
        case TAKE:
            take(t);
            t->phase = NEXT;
            break;
        default:
            t->start += chunk_count(t);
            if (t->start >= t->count) return 1;
            t->phase = CLAIM;
        }
    }
}

static int spin_on(Task *t, long spins) {
    for (long i = 0; i <= spins; i++) {
        long long tick = t->state->tick;
        if (go_on(t)) return 1;
        if (t->state->tick != tick) i = 0; /* a new wait */
        PAUSE();
    }
    return 0;
}

static int run(Task *t, long spins) {
    int ended;
    if (t->count * SIZES[t->dtype] < RELEASE_GIL) return spin_on(t, spins);
    Py_BEGIN_ALLOW_THREADS
    ended = spin_on(t, spins);
    Py_END_ALLOW_THREADS
    return ended;
}

static void task_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Task *)self)->state);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *task_advance(PyObject *self, PyObject *spins_) {
    long spins = PyLong_AsLong(spins_);
    if (spins == -1 && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(run((Task *)self, spins));
}

static PyMethodDef task_methods[] = {
    {"advance", task_advance, METH_O, "Go on, with that many looks at the counters; whether it is done."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef task_members[] = {
    {"awaited", T_LONGLONG, offsetof(Task, awaited), READONLY, "The tick that all ranks must post first."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot task_slots[] = {
    {Py_tp_dealloc, task_dealloc},
    {Py_tp_methods, task_methods},
    {Py_tp_members, task_members},
    {Py_tp_doc, "An all-reduce under way."},
    {0, NULL},
};
static PyType_Spec task_spec = {
    "lockstep.transports.shm._native.Task", sizeof(Task), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, task_slots,
};
static PyTypeObject *task_type;

static int state_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    State *s = (State *)self;
    static char *names[] = {"memory", "rank", "size", "block", "chunk", "halves", "half_bytes", NULL};
    PyObject *memory;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLLLLL", names, &memory, &s->rank, &s->size, &s->block, &s->chunk,
                                     &s->halves, &s->half_bytes))
        return -1;
    if (s->memory.buf != NULL) {
        PyErr_SetString(PyExc_ValueError, "it has its memory already");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &s->memory, PyBUF_WRITABLE) < 0) return -1;
    if (s->size < 1 || s->size > MOST_RANKS || s->rank < 0 || s->rank >= s->size || s->chunk < ALIGN ||
        s->halves + 2 * s->half_bytes > s->memory.len || s->half_bytes < (s->size + 1) * s->chunk) {
        PyErr_SetString(PyExc_ValueError, "the layout does not fit the memory");
        return -1;
    }
    return 0;
}

static void state_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&((State *)self)->memory);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *state_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    State *s = (State *)self;
    if (n != 4) {
        PyErr_SetString(PyExc_TypeError, "all_reduce(address, count, dtype, spins)");
        return NULL;
    }
    if (s->memory.buf == NULL) {
        PyErr_SetString(PyExc_ValueError, "all_reduce: there is no memory");
        return NULL;
    }
    void *data = PyLong_AsVoidPtr(args[0]);
    long long count = PyLong_AsLongLong(args[1]);
    long dtype = PyLong_AsLong(args[2]), spins = PyLong_AsLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (dtype < 0 || dtype >= DTYPES || count < 1 || data == NULL) {
        PyErr_SetString(PyExc_ValueError, "all_reduce: no such dtype, or nothing to reduce");
        return NULL;
    }
    int64_t bytes = count * SIZES[dtype];
    Task local = {.state = s, .data = data, .count = count, .dtype = (int)dtype, .phase = CLAIM, .awaited = 0};
    local.whole = bytes * (s->size - 1) <= WHOLE && bytes <= s->chunk;
    if (run(&local, spins)) Py_RETURN_NONE;
    Task *task = PyObject_New(Task, task_type);
    if (task == NULL) return NULL;
    Py_ssize_t head = offsetof(Task, state);
    memcpy((char *)task + head, (char *)&local + head, sizeof(Task) - (size_t)head);
    Py_INCREF(s);
    return (PyObject *)task;
}

static PyMethodDef state_methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))state_all_reduce, METH_FASTCALL,
     "Sum `count` elements at `address` over all ranks, in place; None when done, or the Task that is left."},
    {NULL, NULL, 0, NULL},
};
#define MEMBER(NAME) {#NAME, T_LONGLONG, offsetof(State, NAME), 0, NULL}
static PyMemberDef state_members[] = {
    MEMBER(tick), MEMBER(low), MEMBER(half), MEMBER(free_0), MEMBER(free_1), {NULL, 0, 0, 0, NULL},
};
static PyType_Slot state_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, state_init},
    {Py_tp_dealloc, state_dealloc},
    {Py_tp_methods, state_methods},
    {Py_tp_members, state_members},
    {Py_tp_doc, "What one rank knows of the exchange."},
    {0, NULL},
};
static PyType_Spec state_spec = {
    "lockstep.transports.shm._native.State", sizeof(State), 0, Py_TPFLAGS_DEFAULT, state_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The all-reduce of shared memory, compiled.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *m = PyModule_Create(&module);
    if (m == NULL) return NULL;
    PyObject *state = PyType_FromSpec(&state_spec);
    task_type = (PyTypeObject *)PyType_FromSpec(&task_spec);
    if (state == NULL || task_type == NULL || PyModule_AddObject(m, "State", state) < 0) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
