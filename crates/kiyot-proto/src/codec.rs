//! A codec for tonic, like tonic's own, with smaller buffers and with limits on the memory of
//! decoded messages.

use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, DecodeBuf},
};
use tonic_prost::{ProstCodec, ProstEncoder};

use crate::bounds::{self, Bounded, BoundsError};

/// The initial size of a call's buffers, which grow with its messages. tonic's default of 8 KiB
/// adds up for a thousand streams that are mostly idle.
const INITIAL_BUFFER_BYTES: usize = 1024;
/// The bytes of encoded messages after which a stream yields, as in tonic.
const YIELD_THRESHOLD_BYTES: usize = 32 * 1024;

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
    U: Bounded + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = Decoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::new(
            INITIAL_BUFFER_BYTES,
            YIELD_THRESHOLD_BYTES,
        ))
    }

    fn decoder(&mut self) -> Self::Decoder {
        Decoder(PhantomData)
    }
}

/// A decoder that refuses messages above the limits of their type.
#[derive(Debug)]
pub struct Decoder<U>(PhantomData<U>);

impl<U: Bounded + Default> tonic::codec::Decoder for Decoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let message = source.copy_to_bytes(source.remaining());
        bounds::decode(message).map(Some).map_err(|error| match error {
            BoundsError::Malformed { .. } | BoundsError::WireType { .. } => {
                Status::internal(error.to_string())
            }
            BoundsError::Length { .. } | BoundsError::Memory { .. } => {
                Status::resource_exhausted(error.to_string())
            }
        })
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(INITIAL_BUFFER_BYTES, YIELD_THRESHOLD_BYTES)
    }
}
