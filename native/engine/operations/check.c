/* Which ops the engine takes: nothing that one names lies outside its buffers. */
#include "shared.h"

uint64_t wc_block_raw(const wc_op *op)
{
    uint64_t elements = wc_codec_shape((int)op->codec).elements;
    return elements ? elements * wc_dtype_size((int)op->dtype) : 1;
}

/* What n bytes of elements are in the op's codec. */
static uint64_t coded_bytes(const wc_op *op, uint64_t n)
{
    uint64_t raw = wc_block_raw(op);
    return (n / raw + (n % raw > 0)) * wc_codec_shape((int)op->codec).bytes;
}

static bool takes(const wc_kernels *kernels, uint32_t codec, uint32_t dtype)
{
    return codec < WC_CODECS ? kernels->encode[codec][dtype] != NULL : wc_codec_shape((int)codec).bytes && dtype <= WC_BF16;
}

bool wc_result_coded(const wc_op *op)
{
    return op->coded >> WC_SCRATCH & 1;
}

static bool place_valid(const wc_op *op, const wc_step *step, const wc_place *place, size_t itemsize)
{
    if (place->buffer >= WC_BUFFERS)
        return false;
    uint64_t size = op->bytes[place->buffer], need = step->length;
    if (step->length && place->buffer != WC_SCRATCH && place->encoded != (op->coded >> place->buffer & 1))
        return false;
    if (place->encoded) {
        if (op->codec == WC_CODEC_NONE || step->start % wc_block_raw(op))
            return false;
        size = place->buffer == WC_SCRATCH ? size : coded_bytes(op, size);
        need = coded_bytes(op, step->length);
    } else if (place->offset % itemsize) {
        return false;
    } else if (place->buffer == WC_RESULT && op->kept && !step->result) {
        size *= 2;
    }
    return place->offset <= size && need <= size - place->offset;
}

static bool writable(const wc_op *op, const wc_step *step, size_t itemsize)
{
    return step->to.buffer != WC_INPUT && place_valid(op, step, &step->to, itemsize);
}

static bool bounds_valid(const wc_op *op, uint32_t index)
{
    const wc_step *step = &op->steps[index];
    for (int i = 0; i < WC_AFTER; i++) {
        int64_t at = step->after[i];
        if (at < -1 || at >= (int64_t)index || (at >= 0 && step->length == 0))
            return false;
        if (at < 0)
            continue;
        const wc_step *a = &op->steps[at];
        bool same = a->start == step->start && a->length == step->length;
        if ((a->direction == WC_SEND && step->direction != WC_RECV) || !same || (i && at == step->after[0]))
            return false;
    }
    return true;
}

static bool local_valid(const wc_op *op, const wc_step *step, size_t itemsize)
{
    if (!writable(op, step, itemsize) || !place_valid(op, step, &step->left, itemsize) || step->length == 0)
        return false;
    switch (step->action) {
    case WC_COPY:
        return step->to.encoded == step->left.encoded;
    case WC_REDUCE:
    case WC_FINAL:
        return !step->to.encoded && !step->left.encoded && place_valid(op, step, &step->right, itemsize);
    case WC_ENCODE:
        return step->to.encoded && !step->left.encoded;
    case WC_DECODE:
        return !step->to.encoded && step->left.encoded;
    default:
        return false;
    }
}

static bool step_valid(const wc_op *op, uint32_t index, size_t itemsize)
{
    const wc_step *step = &op->steps[index];
    if (step->length > INT64_MAX || step->start > INT64_MAX || step->start % itemsize || step->length % itemsize)
        return false;
    if (!bounds_valid(op, index))
        return false;
    if (step->result && (step->direction == WC_SEND || step->to.buffer != WC_RESULT))
        return false;
    if (step->length == 0 && (step->start || step->number))
        return false;
    switch (step->direction) {
    case WC_SEND:
        return step->action == WC_COPY && place_valid(op, step, &step->left, itemsize);
    case WC_RECV:
        if (!writable(op, step, itemsize) || step->action > WC_FINAL)
            return false;
        return step->action == WC_COPY ||
               (!step->to.encoded && !step->left.encoded && place_valid(op, step, &step->left, itemsize));
    case WC_LOCAL:
        return local_valid(op, step, itemsize);
    default:
        return false;
    }
}

static bool vote_valid(const wc_op *op)
{
    if (op->vote_bytes == 0)
        return true;
    return op->vote && op->vote_bytes <= WC_NOTE_BYTES && op->vote_links_count <= WC_MAX_STEPS &&
           (op->vote_links || op->vote_links_count == 0) &&
           (op->vote_digest == 0 || (op->vote_bytes >= 8 && op->vote_digest <= op->vote_bytes - 8));
}

bool wc_op_valid(const wc_engine *engine, const wc_op *op)
{
    if (op->dtype >= WC_DTYPES || op->op >= WC_OPS || op->steps_count > WC_MAX_STEPS)
        return false;
    for (int i = 0; i < WC_BUFFERS; i++)
        if (op->bytes[i] > INT64_MAX / 2)
            return false;
    if ((op->bytes[WC_INPUT] && !op->input) || (op->bytes[WC_RESULT] && !op->result) || (op->steps_count && !op->steps))
        return false;
    if (op->divisor < 1 || op->lanes < 1 || op->lanes > WC_MAX_LANES || op->lane_groups < 1 ||
        op->lane_groups > op->lanes)
        return false;
    if (!vote_valid(op))
        return false;
    if (op->codec == WC_CODEC_NONE ? op->coded : !takes(engine->kernels, op->codec, op->dtype))
        return false;
    if (op->coded >> WC_RESULT & 1 && (op->kept || !wc_result_coded(op)))
        return false;
    if (wc_result_coded(op) && op->digest && !(op->coded >> WC_RESULT & 1) && coded_bytes(op, op->bytes[WC_RESULT]) > op->bytes[WC_SCRATCH])
        return false;
    size_t itemsize = wc_dtype_size((int)op->dtype);
    for (uint32_t i = 0; i < op->steps_count; i++)
        if (!step_valid(op, i, itemsize))
            return false;
    return true;
}
