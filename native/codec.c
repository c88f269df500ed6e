/* The shapes of the codecs' blocks. */
#include "kernels.h"

wc_codec_block wc_codec_shape(int codec) {
    static const wc_codec_block shapes[WC_CODECS] = {
        [WC_CODEC_BF16] = {1, 2}, [WC_CODEC_FP16] = {128, 260}, [WC_CODEC_INT8] = {128, 132}, [WC_CODEC_INT4] = {32, 20}};
    return codec >= 0 && codec < WC_CODECS ? shapes[codec] : (wc_codec_block){0, 0};
}
