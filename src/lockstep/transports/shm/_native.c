/* The collectives of _exchange.c as a Python type: the ExchangeState of rank_states.py, and the calls of native.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "_exchange.h"

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Exchange x;
    int64_t fragment;
} ExchangeState;

static PyObject *advance(Exchange *x, long spins) {
    enum Outcome outcome;
    /* a large one, and one with more ranks than cores, releases the interpreter lock */
    if (x->total_bytes < LARGE && spins != 0) {
        outcome = exchange_advance(x, spins);
    } else {
        Py_BEGIN_ALLOW_THREADS
        outcome = exchange_advance(x, spins);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLong(outcome);
}

/* Reads `count` parts from a tuple of addresses and sizes; one pair may stand for parts of equal size in a row. */
static int read_parts(PyObject *numbers, Part *parts, int64_t count) {
    Py_ssize_t given = PyTuple_Check(numbers) ? PyTuple_Size(numbers) / 2 : -1;
    if (count == 0) return 1;
    for (int64_t i = 0; i < given && i < count; i++) {
        parts[i].at = PyLong_AsVoidPtr(PyTuple_GetItem(numbers, 2 * i));
        parts[i].bytes = PyLong_AsLongLong(PyTuple_GetItem(numbers, 2 * i + 1));
        if (PyErr_Occurred()) return 0;
        if (parts[i].bytes < 0 || (parts[i].bytes > 0 && parts[i].at == NULL)) given = -1;
    }
    if (given == count) return 1;
    if (given != 1 || parts[0].bytes % count != 0) {
        PyErr_SetString(PyExc_ValueError, "begin: not the parts that the collective needs");
        return 0;
    }
    int64_t each = parts[0].bytes / count;
    for (int64_t i = 0; i < count; i++) parts[i] = (Part){parts[0].at + i * each, each};
    return 1;
}

static PyObject *state_begin(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Exchange *x = &((ExchangeState *)self)->x;
    if (n != 6 || x->memory == NULL) {
        PyErr_SetString(PyExc_TypeError, "begin(kind, root, dtype, spins, inputs, outputs), on a state with memory");
        return NULL;
    }
    long kind = PyLong_AsLong(args[0]), root = PyLong_AsLong(args[1]);
    long dtype = PyLong_AsLong(args[2]), spins = PyLong_AsLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    int dtypes = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER ? SUM_DTYPES : DTYPES;
    if (kind < 0 || kind >= KINDS || root < 0 || root >= x->size || dtype < 0 || dtype >= dtypes) {
        PyErr_SetString(PyExc_ValueError, "begin: no such collective, root or dtype");
        return NULL;
    }
    exchange_choose(x, (int)kind, root);
    if (!read_parts(args[4], x->in, x->input_count) || !read_parts(args[5], x->out, x->output_count)) return NULL;
    x->dtype = (int)dtype;
    exchange_begin(x);
    return advance(x, spins);
}

static PyObject *state_advance(PyObject *self, PyObject *spins_) {
    long spins = PyLong_AsLong(spins_);
    if (spins == -1 && PyErr_Occurred()) return NULL;
    return advance(&((ExchangeState *)self)->x, spins);
}

static PyObject *state_copy(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "copy(to, from, bytes)");
        return NULL;
    }
    char *to = PyLong_AsVoidPtr(args[0]), *from = PyLong_AsVoidPtr(args[1]);
    long long bytes = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (bytes < LARGE) {
        if (bytes > 0) exchange_copy(to, from, bytes);
    } else {
        Py_BEGIN_ALLOW_THREADS
        exchange_copy(to, from, bytes);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static int read_numbers(PyObject *const *args, Py_ssize_t n, Py_ssize_t count, long long *numbers) {
    if (n != count) {
        PyErr_Format(PyExc_TypeError, "%zd numbers expected", count);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) numbers[i] = PyLong_AsLongLong(args[i]);
    return !PyErr_Occurred();
}

/* The ring at `offset` in the memory; NULL with an error set if it does not fit. */
static char *ring_at(ExchangeState *s, long long offset, long long done, long long bytes) {
    if (s->x.memory != NULL && offset >= 0 && offset + ring_bytes(s->fragment) <= s->x.halves && offset % 8 == 0 &&
        done >= 0 && bytes >= 0 && bytes <= s->fragment)
        return s->x.memory + offset;
    PyErr_SetString(PyExc_ValueError, "no such ring, or more than a fragment");
    return NULL;
}

static PyObject *state_put(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    ExchangeState *s = (ExchangeState *)self;
    long long a[8];
    if (!read_numbers(args, n, 8, a)) return NULL;
    char *ring = ring_at(s, a[0], a[1], a[7]);
    if (ring == NULL) return NULL;
    Fragment fragment = {a[2], a[3], a[4], a[5], a[7], (char *)(intptr_t)a[6]};
    int put;
    if (fragment.bytes < LARGE) return PyBool_FromLong(ring_put(ring, s->fragment, a[1], &fragment));
    Py_BEGIN_ALLOW_THREADS
    put = ring_put(ring, s->fragment, a[1], &fragment);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(put);
}

static PyObject *state_take(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    ExchangeState *s = (ExchangeState *)self;
    long long a[6];
    if (!read_numbers(args, n, 6, a)) return NULL;
    char *ring = ring_at(s, a[0], a[1], a[5] <= s->fragment ? a[5] : 0);
    if (ring == NULL) return NULL;
    Fragment fragment = {a[2], a[3], a[5], 0, a[5], (char *)(intptr_t)a[4]};
    return PyBool_FromLong(ring_take(ring, s->fragment, a[1], &fragment));
}

static PyObject *state_spin(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    long long a[3];
    if (!read_numbers(args, n, 3, a)) return NULL;
    const char *ring = ring_at((ExchangeState *)self, a[0], a[1], 0);
    if (ring == NULL) return NULL;
    int there;
    Py_BEGIN_ALLOW_THREADS
    there = ring_spin(ring, a[1], (long)a[2]);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(there);
}

static int fits(const Exchange *x, int64_t bytes) {
    return x->size >= 1 && x->size <= MAX_RANKS && x->rank >= 0 && x->rank < x->size &&
           x->chunk >= 2 * (x->size + 1) * ALIGN && (x->signatures + 2) * 8 <= x->block &&
           x->size * x->block <= x->halves &&
           x->halves + 2 * x->half_bytes <= bytes && x->half_bytes >= (x->size + 1) * x->chunk;
}

static int state_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    ExchangeState *s = (ExchangeState *)self;
    Exchange *x = &s->x;
    static char *names[] = {"memory", "rank",   "size",       "block",    "signatures",
                            "chunk",  "halves", "half_bytes", "fragment", NULL};
    PyObject *memory;
    long long rank, size, block, signatures, chunk, halves, half_bytes, fragment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLLLLLLL", names, &memory, &rank, &size, &block, &signatures,
                                     &chunk, &halves, &half_bytes, &fragment))
        return -1;
    if (x->memory != NULL) {
        PyErr_SetString(PyExc_ValueError, "the state has its memory already");
        return -1;
    }
    *x = (Exchange){.rank = rank, .size = size, .block = block, .signatures = signatures, .chunk = chunk,
                    .halves = halves, .half_bytes = half_bytes, .is_empty = 1};
    if (PyObject_GetBuffer(memory, &s->memory, PyBUF_WRITABLE) < 0) return -1;
    if (!fits(x, s->memory.len)) {
        PyErr_SetString(PyExc_ValueError, "the layout does not fit the memory");
        return -1;
    }
    x->in = PyMem_Calloc((size_t)size, sizeof(Part));
    x->out = PyMem_Calloc((size_t)size, sizeof(Part));
    if (x->in == NULL || x->out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    x->memory = s->memory.buf;
    s->fragment = fragment;
    return 0;
}

static void state_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ExchangeState *s = (ExchangeState *)self;
    PyMem_Free(s->x.in);
    PyMem_Free(s->x.out);
    PyBuffer_Release(&s->memory);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef state_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))state_begin, METH_FASTCALL,
     "begin(kind, root, dtype, spins, inputs, outputs): begin a collective; its outcome."},
    {"advance", state_advance, METH_O, "advance(spins): continue the collective; its outcome."},
    {"copy", (PyCFunction)(void (*)(void))state_copy, METH_FASTCALL, "copy(to, from, bytes)"},
    {"put", (PyCFunction)(void (*)(void))state_put, METH_FASTCALL,
     "put(ring, done, tag, dtype, total, offset, address, bytes): write a fragment; whether there was room."},
    {"take", (PyCFunction)(void (*)(void))state_take, METH_FASTCALL,
     "take(ring, done, tag, dtype, address, bytes): read a whole message from one fragment; whether it was there."},
    {"spin", (PyCFunction)(void (*)(void))state_spin, METH_FASTCALL,
     "spin(ring, done, spins): spin for a fragment; whether there is one."},
    {NULL, NULL, 0, NULL},
};

#define MEMBER(NAME, FIELD, FLAGS) \
    {NAME, T_LONGLONG, offsetof(ExchangeState, x) + offsetof(Exchange, FIELD), FLAGS, NULL}
static PyMemberDef state_members[] = {
    MEMBER("tick", tick, 0),
    MEMBER("low", low, 0),
    MEMBER("half", half, 0),
    MEMBER("free_0", free_at[0], 0),
    MEMBER("free_1", free_at[1], 0),
    MEMBER("awaited_tick", awaited_tick, READONLY),
    MEMBER("awaited_rank", awaited_rank, READONLY),
    MEMBER("mismatched_rank", mismatched_rank, READONLY),
    MEMBER("found_signature", found_signature, READONLY),
    MEMBER("expected_signature", expected_signature, READONLY),
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot state_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, state_init},
    {Py_tp_dealloc, state_dealloc},
    {Py_tp_methods, state_methods},
    {Py_tp_members, state_members},
    {Py_tp_doc, "The state of one rank in the exchange."},
    {0, NULL},
};
static PyType_Spec state_spec = {
    "lockstep.transports.shm._native.ExchangeState", sizeof(ExchangeState), 0, Py_TPFLAGS_DEFAULT, state_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The collectives of shared memory, in C.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *m = PyModule_Create(&module);
    if (m == NULL) return NULL;
    PyObject *state = PyType_FromSpec(&state_spec);
    if (state == NULL || PyModule_AddObject(m, "ExchangeState", state) < 0) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
