//! How messages become bytes: as tonic's own codec does it, with smaller buffers.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::BufferSettings;
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

/// What a call begins with. Its buffers grow with its messages; tonic's own begin with 8 KiB, which
/// a thousand streams hold that mostly wait.
const BEGIN_BYTES: usize = 1024;
/// A stream of many small messages is sent in pieces of this size, as tonic does.
const PIECE_BYTES: usize = 32 * 1024;

/// The codec of all generated clients and servers.
#[derive(Debug, Clone)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(BEGIN_BYTES, PIECE_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BEGIN_BYTES, PIECE_BYTES))
    }
}
