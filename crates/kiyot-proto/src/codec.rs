//! How messages become bytes: as tonic's own codec does it, with smaller buffers, and with a limit
//! for the memory that a decoded message needs.

use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, DecodeBuf},
};
use tonic_prost::{ProstCodec, ProstEncoder};

use crate::bounds::{self, Bounded, BoundsError};

/// What a call begins with. Its buffers grow with its messages; tonic's own begin with 8 KiB, which
/// a thousand streams hold that mostly wait.
const INITIAL_BUFFER_BYTES: usize = 1024;
/// A stream of many small messages is sent in pieces of this size, as tonic does.
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

/// Decodes messages that need no more memory than their type may.
#[derive(Debug)]
pub struct Decoder<U>(PhantomData<U>);

impl<U: Bounded + Default> tonic::codec::Decoder for Decoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let message = source.copy_to_bytes(source.remaining());
        bounds::decode(message).map(Some).map_err(|refused| match refused {
            BoundsError::Malformed { .. } | BoundsError::WireType { .. } => {
                Status::internal(refused.to_string())
            }
            BoundsError::Length { .. } | BoundsError::Memory { .. } => {
                Status::resource_exhausted(refused.to_string())
            }
        })
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(INITIAL_BUFFER_BYTES, YIELD_THRESHOLD_BYTES)
    }
}
